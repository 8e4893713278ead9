"""Trained: which model of transformers a run trains, on which tokens: for its report, and for its checkpoints."""

from zero_minimal.workload.settings import Settings


def described(settings: Settings) -> dict:
    """{"model": …} for a report, {} for our GPT.

    {"name": of its class, "file", "vocabulary": tokens of the model, "tokens": "bytes" or the tokenizer's file,
     "gap": the token of a gap, None for a model that goes on with a text}
    """
    if not settings.model:
        return {}
    sizes = settings.foreign.sizes
    return {"model": {"name": sizes["name"], "file": settings.model, "vocabulary": sizes["vocabulary"],
                      "tokens": settings.tokenizer or "bytes", "gap": settings.gap}}


def line(report: dict) -> list[str]:
    """What a reader is told of it: one line, or none."""
    if not (model := report.get("model")):
        return []
    read = "bytes" if model["tokens"] == "bytes" else f"tokens of {model['tokens']}"
    does = "predicts the next one" if model["gap"] is None else "fills gaps (15%; all behind one token)"
    return [f"{model['name']} of {model['file']}, vocabulary {model['vocabulary']:,}: reads {read}, {does}"]


def unit(report: dict) -> str:
    """Of what a loss is the mean."""
    model = report.get("model", {"tokens": "bytes", "gap": None})
    return f"{'' if model['gap'] is None else 'hidden '}{'byte' if model['tokens'] == 'bytes' else 'token'}"


def configuration(settings: Settings) -> dict:
    """What a checkpoint keeps beside the settings: {"model": the entries of its config.json, "gap": the token of a gap,
    or None}, {} for our GPT."""
    return {"model": settings.foreign.entries(), "gap": settings.gap} if settings.model else {}


def differ(before: dict | None, settings: Settings) -> str:
    """How a checkpoint's model, its "model", is another one than this run's, in words; "" if it is not, or if it does
    not say."""
    if before is None:
        return ""
    if not settings.model:
        return f"it is a {before.get('model_type')} of transformers: give --model config.json"
    found = settings.foreign.differences(before)
    return "; ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in found.items())

"""Trained: the model of transformers that a run trains, and its tokens, for reports and checkpoints."""

from zero_minimal.workload.settings import Settings


def described(settings: Settings) -> dict:
    """{"model": …} for a report, {} for our GPT.

    {"name": of its class, "file", "vocabulary": tokens of the model, "tokens": "bytes" or the tokenizer's file,
     "gap": the mask token, None for a model that continues a text}
    """
    if not settings.model:
        return {}
    sizes = settings.foreign.sizes
    return {"model": {"name": sizes["name"], "file": settings.model, "vocabulary": sizes["vocabulary"],
                      "tokens": settings.tokenizer or "bytes", "gap": settings.gap}}


def line(report: dict) -> list[str]:
    """The lines about it for a reader: one, or none."""
    if not (model := report.get("model")):
        return []
    read = "bytes" if model["tokens"] == "bytes" else f"tokens of {model['tokens']}"
    does = "predicts the next one" if model["gap"] is None else "fills gaps (15%; all behind one token)"
    return [f"{model['name']} of {model['file']}, vocabulary {model['vocabulary']:,}: reads {read}, {does}"]


def unit(report: dict) -> str:
    """The unit over which a loss is the mean."""
    model = report.get("model", {"tokens": "bytes", "gap": None})
    return f"{'' if model['gap'] is None else 'hidden '}{'byte' if model['tokens'] == 'bytes' else 'token'}"


def configuration(settings: Settings) -> dict:
    """What a checkpoint keeps besides the settings: {"model": the entries of its config.json, "gap": the mask token, or
    None}, {} for our GPT."""
    return {"model": settings.foreign.entries, "gap": settings.gap} if settings.model else {}


def differ(before: dict | None, settings: Settings) -> str:
    """How a checkpoint's "model" differs from this run's, in words; "" if it does not, or if the checkpoint has no
    entry."""
    if before is None:
        return ""
    if not settings.model:
        return f"it is a {before.get('model_type')} of transformers: give --model config.json"
    found = settings.foreign.differences(before)
    return "; ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in found.items())

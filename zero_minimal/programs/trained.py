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
    """What a checkpoint keeps beside the settings: {"model": the entries of its config.json}, {} for our GPT."""
    return {"model": settings.foreign.entries()} if settings.model else {}


def differ(before: dict | None, now: dict) -> str:
    """How a checkpoint's model is another one than this run's, in words; "" if it is not. None: it does not say."""
    now = now.get("model", {})
    if before is None or before == now:
        return ""
    if not before or not now:
        return "it is of the course's GPT" if now else f"it is of a {before.get('model_type')}: give its --model"
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return "of its model " + "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names)

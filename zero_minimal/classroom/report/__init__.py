"""`grade --html`: one page in which a learner steps through what their ranks did on one small run.

    FILE ─ recording.py ─ ranks, in the sandbox: KIND_in_ranks.py, recorder.py
                       └─ what they wrote ─ KIND_told.py ─ story.py ─ page.py, page.html ─ one file

A lesson chooses what is drawn by `report = "KIND"` in its lesson.toml, and writes nothing:

    messages    functions of send and receive: who sends which chunk to whom, round by round (rings.py)
    buckets     a stage's class: a bucket's way, memory by category, two steps of training (stage_rules.py); of stage 3
                which units are here, turn by turn (unit_rules.py)

What is expected comes from rules and formulas, never from the reference's file.
"""

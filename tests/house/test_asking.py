"""Asking: a notebook waits for a guess, and knows what many get wrong; clean copies of it hold no answer."""

import ast
import contextlib
import io
import json
import re
import shutil

import nbformat
import pytest
from cells import sources_of
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from zero_minimal import notebook
from zero_minimal.notebook.ask import NEAR, NoGuess, begin
from zero_minimal.programs import notebooks, record

FIRST = "Your guess comes first: write a number in place of the three dots, and run this cell again."
ASKED = r"guess_\w+ = notebook\.ask\("


@pytest.fixture(autouse=True)
def a_learner(monkeypatch, tmp_path):
    """Not somebody who only reads, and with a record of their own."""
    monkeypatch.delenv("ZERO_READING", raising=False)
    monkeypatch.setenv("ZERO_PROGRESS", str(tmp_path / "progress.json"))
    yield
    begin("")


def printed(function, *args, **options):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        function(*args, **options)
    return text.getvalue()


# ----------------------------------------------------------------------------------------------------------- a guess


@pytest.mark.parametrize("answer, words", [
    ((), FIRST),
    ((...,), FIRST),
    (("12",), "Write a number without quotes, such as 12.5, and not '12', and run this cell again."),
    ((float("nan"),), "Write a number, such as 12.5, and not nan, and run this cell again."),
    ((float("inf"),), "Write a number, such as 12.5, and not inf, and run this cell again."),
    ((True,), "Write a number, such as 12.5, and not True, and run this cell again."),
    (([12],), "Write a number, such as 12.5, and not [12], and run this cell again."),
    ((12, 5), "Write one number, with a point and not a comma in it, such as 12.5, and run this cell again."),
])
def test_what_is_no_guess_is_refused_in_one_sentence(answer, words):
    with pytest.raises(NoGuess) as refused:
        notebook.ask("How many MB?", *answer, unit="MB")
    assert refused.value._render_traceback_() == [words], "what a notebook shows in place of a traceback"


def test_who_only_reads_needs_no_guess(monkeypatch):
    monkeypatch.setenv("ZERO_READING", "0")
    with pytest.raises(NoGuess):
        notebook.ask("How many MB?", ...)
    monkeypatch.setenv("ZERO_READING", "1")
    assert printed(notebook.ask("How many MB?", ..., unit="MB").compare, 25, {12: "half"}) == "measured: 25 MB\n"
    assert "You said 25 MB: right" in printed(notebook.ask("How many MB?", 25, unit="MB").compare, 25)


KNOWN = {12: "the tensor, once", 24: "sent and received added", 16.1: "hardly another number"}


@pytest.mark.parametrize("guess, told", [
    (16, "You said 16 MB: right.\n"),
    (16.2, "You said 16.2 MB: right.\n"),
    (20, "You said 20 MB: 25% too high.\n"),
    (4, "You said 4 MB: 4 times too low.\n"),
    (0, "You said 0 MB.\n"),
    (24, "You said 24 MB: 50% too high.\n24 MB would be: sent and received added.\n"),
    (11.9, "You said 11.9 MB: 26% too low.\n12 MB would be: the tensor, once.\n"),
])
def test_a_guess_is_compared(guess, told):
    assert printed(notebook.ask("How many?", guess, unit="MB").compare, 16, KNOWN) == f"measured: 16 MB. {told}"


@pytest.mark.parametrize("guess, told", [
    (1101, "You said 1,101: not this time.\n1,101 would be: without its own part.\n"),
    (1110, "You said 1,110: not this time.\n"), (1111, "You said 1,111: right.\n")])
def test_some_guesses_must_be_exact(guess, told):
    said = printed(notebook.ask("Which?", guess).compare, 1111, {1101: "without its own part"}, within=0)
    assert said == f"measured: 1,111. {told}"


def test_guesses_are_kept():
    begin("03_gradients")
    guess = notebook.ask("How many MB?", 24, unit="MB")
    printed(guess.compare, 16)
    (kept,) = record.read()["03_gradients"].guesses["How many MB?"]
    assert (kept.guess, kept.measured, kept.unit) == (24, 16, "MB")


def test_a_record_that_cannot_be_kept_stops_nobody(monkeypatch):
    begin("03_gradients")
    monkeypatch.setattr(record, "add_guess", lambda *_, **__: 1 / 0)
    assert "25% too high" in printed(notebook.ask("How many MB?", 20).compare, 16)


# ------------------------------------------------------------------------------------ what the notebooks know of wrong


def measured_by_the_formula(lesson, n):
    """What the notebook's expressions come to on n ranks: {expression of world[…]: by rank}."""
    if lesson == "00_collectives":
        total = sum(10**rank for rank in range(n))
        return {"part.item()": [total] * n, "seen.sent_bytes": [round(2 * 12e6 * (n - 1) / n)] * n}
    psi = 4_820_992
    return {"psi": [psi], "held['stage 2'][1]['gradients']": [4 * psi / n], "rows[-1]['gradients']": [8 * psi],
            "sent['stage 2']": [8 * psi * (n - 1) / n],
            # as it was measured on 2 ranks; on 4 it falls by as much
            "ledgers['stage 1'].peak.total": [86_200_000], "ledgers['stage 2'].peak.total": [71_100_000]}


def comparisons(lesson, n):
    """{the name of a guess: what the notebook compares it with on n ranks}: measured, known wrong ones, options."""
    seen, names = {}, {"n": n, "world": measured_by_the_formula(lesson, n),
                       "taken": lambda *args, **options: (args, options)}
    for source in sources_of(lesson).values():
        if ".compare(" not in source or "latency" in source:
            continue
        for line in ast.parse(source).body:
            call = getattr(line, "value", None)
            if isinstance(line, ast.Assign) and "world" not in ast.unparse(line.targets[0]):
                with contextlib.suppress(NameError, KeyError):  # what only a run can tell
                    exec(ast.unparse(line), names)
            elif isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "compare":
                seen[call.func.value.id] = eval(f"taken({ast.unparse(call).partition('(')[2]}", names)
    return seen


@pytest.mark.parametrize("n", (2, 3, 4))
@pytest.mark.parametrize("lesson", ("00_collectives", "03_gradients"))
def test_known_wrong_answers_are_named_on_any_number_of_ranks(lesson, n):
    asked = comparisons(lesson, n)
    assert len(asked) == {"00_collectives": 2, "03_gradients": 4}[lesson]
    for (measured, known), options in asked.values():
        assert len(known) >= 3
        compared = {guess: printed(notebook.ask("?", guess).compare, measured, known, **options)
                    for guess in (measured, *known)}
        assert compared[measured].endswith(": right.\n"), "what is right is called wrong"
        for wrong, thought in known.items():
            if abs(wrong - measured) > options.get("within", NEAR) * measured:
                assert f"would be: {thought}" in compared[wrong]
            else:
                assert "right" in compared[wrong], "with few ranks a wrong thought may be right"


@pytest.mark.parametrize("lesson", ("00_collectives", "03_gradients"))
def test_every_prediction_is_asked_for(lesson):
    sources = list(sources_of(lesson).values())
    asked = [match[0].split()[0] for source in sources for match in re.finditer(ASKED, source)]
    assert len(asked) == len(set(asked)) == {"00_collectives": 3, "03_gradients": 4}[lesson]
    for name in asked:
        assert sum(f"{name}.compare(" in source for source in sources) == 1
    assert not any("how_far" in source or "my_guess" in source for source in sources)


# -------------------------------------------------------------------------------------------- clean copies, to hand out


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    notebooks.main(["--clean", str(folder)])
    return folder


def test_a_clean_copy_has_no_outputs_and_no_answers(copies):
    files = sorted(file.name for file in notebooks.NOTEBOOKS.glob("*.ipynb"))
    assert sorted(file.name for file in copies.iterdir()) == files
    for name in files:
        book = nbformat.read(copies / name, 4)
        nbformat.validate(book)
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code)
        assert sum(re.search(r",\s+\.\.\.", cell.source) is not None for cell in code
                   if re.search(ASKED, cell.source)) in (3, 4)


@pytest.mark.parametrize("answered, asked", [
    ('guess = notebook.ask("Ψ MB?", 12.5, unit="MB")  # mine', 'guess = notebook.ask("Ψ MB?", ..., unit="MB")  # mine'),
    ('guess = ask("MB?",\n    24 / 2,\n    unit="MB")\nx = 1', 'guess = ask("MB?",\n    ...,\n    unit="MB")\nx = 1'),
    ('ask("MB?", 12, 5)', 'ask("MB?", ...)'),
    ('ask("MB?", ...)', 'ask("MB?", ...)'),
    ("%%px\nask(1, 2)", "%%px\nask(1, 2)"),
])
def test_answers_are_taken_out(answered, asked):
    assert notebooks.unanswered(answered) == asked


def targets(folder):
    """Where the links of the copies lead."""
    cells = [cell for file in folder.glob("*.ipynb") for cell in json.loads(file.read_text())["cells"]]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return [link for text in texts for link in re.findall(r"\]\(([^)]+)\)", text)]


def test_no_link_of_a_copy_leads_nowhere(copies, tmp_path, capsys):
    assert set(targets(copies)) == {"00_collectives.ipynb"}, "others could not be followed from there"
    assert "`lessons/00_collectives/README.md` of the course" in (copies / "00_collectives.ipynb").read_text()
    notebooks.main(["--clean", str(tmp_path / "b"), "--links", "https://example.org/course/"])
    assert "https://example.org/course/lessons/00_collectives/README.md" in targets(tmp_path / "b")
    inside = notebooks.HOUSE / "build" / "copies of a test"  # git ignores build/
    try:
        notebooks.main(["--clean", str(inside)])
        found = targets(inside)
        assert len(found) >= 5 and all((inside / target).exists() for target in found)
    finally:
        shutil.rmtree(inside)


def test_what_a_learner_wrote_is_not_overwritten(copies, capsys):
    notebooks.main(["--clean", str(copies)])  # nobody has written into them: nothing is lost
    file = copies / "03_gradients.ipynb"
    clean = file.read_text()
    file.write_text(clean.replace(" ..., unit", " 9.6, unit"))
    with pytest.raises(SystemExit) as refused:
        notebooks.main(["--clean", str(copies)])
    assert refused.value.code == 2 and "03_gradients.ipynb: there already" in capsys.readouterr().err
    assert " 9.6, unit" in file.read_text()
    notebooks.main(["--clean", str(copies), "--force"])
    assert file.read_text() == clean
    with pytest.raises(SystemExit):
        notebooks.main(["--clean", str(notebooks.NOTEBOOKS), "--force"])
    assert "the course's own notebooks" in capsys.readouterr().err


def run_on(client, first):
    """Run the cells from this one on, as Run All does. Returns the number of the one that stops it."""
    for number, cell in enumerate(client.nb.cells[first:], first):
        try:
            client.execute_cell(cell, number)
        except CellExecutionError:
            return number
    return None


@pytest.mark.thorough
@pytest.mark.timeout(100)
def test_run_all_stops_where_a_guess_is_missing(copies, monkeypatch):
    monkeypatch.setenv("ZERO_RANKS", "2")
    book = nbformat.read(copies / "00_collectives.ipynb", 4)
    first, second = [number for number, cell in enumerate(book.cells) if re.match(ASKED, cell.source)][:2]
    client = NotebookClient(book, timeout=60)
    with client.setup_kernel():
        assert run_on(client, 0) == first
        assert [output.traceback for output in book.cells[first].outputs] == [[FIRST]]
        book.cells[first].source = book.cells[first].source.replace("...", "10")
        assert run_on(client, first) == second, "an answer does not go on"
    compared = next(cell for cell in book.cells if "guess_sum.compare" in cell.source)
    assert "You said 10: not this time.\n10 would be: rank 1's own part" in compared.outputs[0].text
    assert [output.traceback for output in book.cells[second].outputs] == [[FIRST]]

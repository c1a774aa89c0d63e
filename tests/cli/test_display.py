"""What `up` shows: lines that stay, and progress that does not flood a log."""

import io

from rich.console import Console

from cacheaware.display import PlainDisplay, TerminalDisplay, display


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80), out


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    out, text = console(terminal=False)
    shown = display(out, out)
    assert isinstance(shown, PlainDisplay)
    for percent in range(100):
        shown.progress("Converting", percent / 100)
    shown.progress("Loading")
    shown.line("Ready: [bold] is text here, " + "and long lines are not cut " * 5)
    shown.progress_done()
    lines = text.getvalue().splitlines()
    assert lines[:2] == ["Converting", "Loading"]
    assert lines[2].startswith("Ready: [bold] is text here")
    assert len(lines) == 3


def test_problems_go_to_standard_error_without_a_terminal() -> None:
    (out, text), (err, errors) = console(terminal=False), console(terminal=False)
    display(out, err).problem("port 8000 is in use")
    assert (text.getvalue(), errors.getvalue()) == ("", "port 8000 is in use\n")


def test_on_a_terminal_progress_is_replaced_and_can_begin_again() -> None:
    out, text = console(terminal=True)
    shown = display(out, out)
    assert isinstance(shown, TerminalDisplay)
    for step in ("Getting the model [1/2]", "Starting"):
        shown.progress(step, 0.5)
        shown.progress_done()
        shown.progress_done()  # there may be nothing to end
    assert "Getting the model [1/2]" in text.getvalue()
    assert "Starting" in text.getvalue()

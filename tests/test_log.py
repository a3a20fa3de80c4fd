"""The package's log has the format that the program has chosen, or else the package's own format."""

import logging
from pathlib import Path


def test_information_is_plain_and_warnings_have_the_format_of_errors(monkeypatch, capfd):
    # pytest installs handlers. Without them the program has not configured logging.
    monkeypatch.setattr(logging.root, "handlers", [])
    log = logging.getLogger("jaxddp.experiment")
    log.info("26 of the network's 32 arrays")
    log.warning("%s: is missing", "x")
    assert capfd.readouterr().err == "26 of the network's 32 arrays\njaxddp: warning: x: is missing\n"
    # absl also calls basicConfig, so this default handler does not mean that the program has chosen a format.
    logging.basicConfig()
    log.warning("again")
    assert capfd.readouterr().err == "jaxddp: warning: again\n"


def test_lines_appear_once_in_the_format_that_a_program_has_chosen(monkeypatch, tmp_path: Path, capfd):
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.basicConfig(filename=tmp_path / "log", format="%(name)s says %(message)s")
    logging.getLogger("jaxddp.data").warning("damaged")
    logging.root.handlers[0].close()
    assert (tmp_path / "log").read_text() == "jaxddp.data says damaged\n" and capfd.readouterr().err == ""

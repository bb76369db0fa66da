# SPDX-License-Identifier: Apache-2.0
"""Logs, as a reader of standard output sees them. Logging is set up once per process, so each test is a process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest


def run(code: str, *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False)
    if check:
        assert done.returncode == 0, done.stderr.decode()
    return done


def lines(code: str) -> list[dict]:
    return [json.loads(line) for line in run(code).stdout.splitlines()]


def test_a_line_is_json_with_event_fields_level_time_and_logger():
    (line,) = lines(
        """
        from aliquot.api import log
        logger = log.get_logger("prepare")  # at import time, as modules do
        log.configure()
        logger.info("claim prepared", claim_uid="u1", devices=2)
        logger.debug("not shown")
        """
    )
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "claim prepared", "claim_uid": "u1", "devices": 2, "level": "info", "logger": "prepare"}


def test_what_a_call_is_about_is_on_every_line_below_and_not_after():
    inside, outside = lines(
        """
        from aliquot.api import log
        log.configure()
        with log.bound(claim_uid="u1"):
            log.get_logger("a").warning("slow")
        log.get_logger("a").warning("later")
        """
    )
    assert inside["claim_uid"] == "u1"
    assert "claim_uid" not in outside


def test_an_exception_is_one_line_with_its_traceback():
    (line,) = lines(
        """
        from aliquot.api import log
        log.configure()
        try:
            1 / 0
        except ZeroDivisionError:
            log.get_logger("a").exception("failed")
        """
    )
    assert line["level"] == "error"
    assert "ZeroDivisionError" in line["exception"]


def test_library_logs_come_out_the_same_way_from_warnings_on():
    library, warned = lines(
        """
        import logging, warnings
        from aliquot.api import log
        log.configure()
        logging.getLogger("urllib3.pool").info("connected")
        logging.getLogger("urllib3.pool").critical("pool %s full", "x")
        warnings.warn("old", UserWarning, stacklevel=1)
        """
    )
    assert (library["event"], library["message"], library["level"]) == ("library log", "pool x full", "error")
    assert library["logger"] == "urllib3.pool"
    assert warned["logger"] == "py.warnings"
    assert "UserWarning: old" in warned["message"]


def test_debug_shows_library_info_and_error_hides_our_warnings():
    shown = lines(
        """
        import logging
        from aliquot.api import log
        log.configure(level="debug")
        logging.getLogger("x").info("connected")
        log.get_logger("a").debug("detail")
        """
    )
    assert [line["event"] for line in shown] == ["library log", "detail"]
    assert (
        lines(
            """
        from aliquot.api import log
        log.configure(level="error")
        log.get_logger("a").warning("hidden")
        """
        )
        == []
    )


def test_values_that_cannot_be_encoded_do_not_lose_the_line():
    first, second, third = lines(
        r"""
        from pathlib import Path
        from aliquot.api import log
        class Broken:
            def __repr__(self): raise RuntimeError
        log.configure()
        logger = log.get_logger("a")
        logger.info("one", path=Path("/x"), where={1, 2})
        logger.info("two", text="\udcff")
        logger.info("three", thing=Broken(), other=5)
        """
    )
    assert first["path"] == "PosixPath('/x')"
    assert second["text"] == "\\udcff"
    assert third["thing"] == "<unprintable Broken>"
    assert third["other"] == "5"


@pytest.mark.parametrize("sink", ["open('/dev/full', 'wb', buffering=0)", "closed()"])
def test_a_line_that_cannot_be_written_harms_nobody(sink):
    done = run(
        f"""
        import io
        from aliquot.api import log
        def closed():
            stream = io.BytesIO()
            return stream
        stream = {sink}
        log.configure(stream=stream)
        if isinstance(stream, io.BytesIO): stream.close()
        log.get_logger("a").info("one")
        import logging; logging.getLogger("x").error("two")
        """
    )
    assert done.stderr == b""


def test_console_lines_are_for_people():
    done = run(
        """
        from aliquot.api import log
        log.configure(fmt="console")
        log.get_logger("prepare").info("claim prepared", claim_uid="u1")
        """
    )
    text = done.stdout.decode()
    assert "claim prepared" in text
    assert "claim_uid=u1" in text
    assert "\x1b" not in text  # not a terminal
    assert not text.startswith("{")


@pytest.mark.parametrize(
    ("arguments", "named"), [('level="loud"', "debug, info, warning, error"), ('fmt="xml"', "json, console")]
)
def test_another_level_or_format_is_refused_with_the_choice(arguments, named):
    done = run(f"from aliquot.api import log; log.configure({arguments})", check=False)
    assert done.returncode == 1
    assert f"use one of {named}" in done.stderr.decode()


def test_lines_of_many_threads_do_not_mix():
    shown = lines(
        """
        import threading
        from aliquot.api import log
        log.configure()
        logger = log.get_logger("a")
        def work(n):
            for i in range(200):
                logger.info("line", n=n, text="x" * 500)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        """
    )
    assert len(shown) == 800

# SPDX-License-Identifier: Apache-2.0
"""Structured logs: one JSON object a line on standard output, or aligned text for a terminal.

The only module of this folder that does I/O. Never raises into a caller: a value that cannot be encoded is written
as its `repr`, a line that cannot be written is dropped. Invariant: the event is a constant lower-case phrase and
facts are fields, so lines can be counted and searched; what a whole call is about (claim, node) is bound once at its
border with `bound` and appears on every line below, also on those of other threads' libraries.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, BinaryIO, Final, Literal, cast

import msgspec
import structlog
from structlog.contextvars import bound_contextvars as bound
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from aliquot.api.errors import SettingsError

__all__ = ["FORMATS", "LEVELS", "Format", "bound", "configure", "get_logger"]

Format = Literal["json", "console"]
FORMATS: Final[tuple[Format, ...]] = ("json", "console")
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(*, level: str = "info", fmt: str = "json", stream: BinaryIO | None = None) -> None:
    """Sets up logging for the process; called once, before the first line is written.

    `level` is one of `LEVELS`, `fmt` one of `FORMATS`, `stream` takes bytes (standard output if not given). Lines of
    libraries that use the standard `logging` come out the same way, from warnings on; with `debug`, from info on.

    Raises `SettingsError` for another level or format.
    """
    if level not in LEVELS:
        raise SettingsError(f'log level "{level}" is unknown: use one of {", ".join(LEVELS)}')
    if fmt not in FORMATS:
        raise SettingsError(f'log format "{fmt}" is unknown: use one of {", ".join(FORMATS)}')
    sink = _Sink(stream if stream is not None else sys.stdout.buffer)
    render: Processor = _render_json if fmt == "json" else _render_console(sink.is_terminal())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _name_logger,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.BytesLoggerFactory(file=cast("BinaryIO", sink)),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_Route()]
    root.setLevel(logging.INFO if LEVELS[level] <= logging.DEBUG else logging.WARNING)
    logging.captureWarnings(capture=True)


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry `logger: name`; may be made at import time, before `configure`."""
    return cast("FilteringBoundLogger", structlog.get_logger(logger_name=name))


def _name_logger(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The library itself takes an argument called `logger`, so the field gets its name here."""
    if "logger_name" in event:
        event["logger"] = event.pop("logger_name")
    return event


class _Sink:
    """A byte stream whose failure is nobody's problem: a full disk or closed pipe must not fail a claim."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._write = stream.write
        self._flush = stream.flush

    def is_terminal(self) -> bool:
        return self._stream.isatty()

    def write(self, line: bytes) -> int:
        try:
            return self._write(line)
        except (OSError, ValueError):  # ValueError: closed
            return 0

    def flush(self) -> None:
        try:
            self._flush()
        except (OSError, ValueError):
            return


class _Route(logging.Handler):
    """Hands records of the standard `logging` to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.ERROR)
            # The text of a library is a field like any other foreign text; only our own events are constant.
            get_logger(record.name).log(level, "library log", message=record.getMessage(), exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


_encoder: Final = msgspec.json.Encoder(enc_hook=repr)


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> bytes:
    try:
        return _encoder.encode(event)
    except Exception:  # lone surrogates, keys that are no strings, a __repr__ that raises
        return _encoder.encode({_ascii(key): _ascii(value) for key, value in event.items()})


def _ascii(value: Any) -> str:
    try:
        return str(value).encode("ascii", "backslashreplace").decode()
    except Exception:
        return f"<unprintable {type(value).__name__}>"


def _render_console(colors: bool) -> Processor:
    # Our exception text is already made, so structlog's own pretty printer (which wants rich) has nothing to do.
    text = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)

    def render(logger: WrappedLogger, method: str, event: EventDict) -> bytes:
        return str(text(logger, method, event)).encode("utf-8", "backslashreplace")

    return render

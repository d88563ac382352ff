"""Custom functions in Python files: loaded as modules, with errors that name their file.

``python -m stages.harness.user_code MODULE CODE FUNCTION ARGUMENT`` calls ``try_file`` of a stage's
module in that stage's environment: it calls the function once on an example, before a run pays for
anything.
"""

import importlib
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from stages.contract.errors import GebError, UserError
from stages.contract.events import Emitter
from stages.harness.program import run_program

_MODULE_PREFIX = "geb_file_"
# Results are found again by the digest of this file alone.
_ALONE = (
    "put the code of other files into this one, or install it as a package (not an editable one) "
    "in the stage's environment"
)
# Not GEB's modules, nor environments and caches in the file's folder.
_HELPER = r"(?!stages\.)\S+ {}/(?!(.*/)?(\.|lib(64)?/python3|site-packages/))"


class UserFunction:
    """The function ``name`` of a file; a subclass says what it is for and checks its results.

    Raises:
        UserError: The file cannot be imported, or has no such function.
    """

    noun: ClassVar[str]
    """The function's purpose, in messages."""
    section: ClassVar[str]
    """Section of the configuration that names the function and gives its settings."""
    signature: ClassVar[str]
    remedy: ClassVar[str]
    """Remedy for an exception of the function."""
    listed: ClassVar[Any] = Iterator
    """Results that become lists while errors are still the function's; not mappings and sets."""

    def __init__(self, path: Path, name: str, settings: Mapping[str, Any] | None = None) -> None:
        self.title = f"the {self.noun} {path.name}:{name}"
        self._settings = settings or {}
        self._path = path
        namespace = _execute(path)
        self._function = namespace.get(name)
        if not callable(self._function):
            functions = sorted(key for key, value in namespace.items() if callable(value))
            raise UserError(
                f"{path} has no function {name!r}; it has: {', '.join(functions) or 'none'}",
                f"set {self.section}.function to the name of one with the signature "
                f"{self.signature}",
            )

    def call(self, *arguments: Any) -> Any:
        """The function's result; a list if it is one of ``listed``."""
        assert callable(self._function)
        with (
            _without_helpers(self._path),
            _explained(self.title, f"{self.remedy}; it is called as {self.signature}"),
        ):
            result = self._function(*arguments, **self._settings)
            # A generator runs only now.
            is_ordered = not isinstance(result, Mapping | Set)
            return list(result) if is_ordered and isinstance(result, self.listed) else result


def _execute(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} is not a file of Python", "name the file that has the function")
    module = ModuleType(_MODULE_PREFIX + path.stem.replace(".", "_"))
    module.__file__ = str(path)
    # Where `dataclasses`, pydantic and pickle look a class's or a function's module up. Under a
    # name that hides no module that the file imports.
    sys.modules[module.__name__] = module
    with _without_helpers(path), _explained(str(path), _ALONE):
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module.__dict__


@contextmanager
def _without_helpers(path: Path) -> Iterator[None]:
    """Refuses code that imports modules from the folder of its file, or from folders in it."""
    before = set(sys.modules)
    yield
    pattern = _HELPER.format(re.escape(str(path.parent)))
    helpers = []
    for name in sorted(sys.modules.keys() - before):
        file = getattr(sys.modules[name], "__file__", None)
        if re.match(pattern, f"{name} {file}"):
            helpers.append(name)
    if helpers:
        raise UserError(f"{path} imports {', '.join(helpers)} from its own folder", _ALONE)


@contextmanager
def _explained(name: str, remedy: str) -> Iterator[None]:
    """Turns what code of the user raises into an error that names it.

    Processes that are not forks are refused: they cannot import the file, and a pool of them waits
    for ever.
    """
    prepare = spawn.get_preparation_data
    spawn.get_preparation_data = _refuse_spawn
    try:
        yield
    except OSError as error:
        raise GebError(f"{name} raised {_describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} raised {_describe(error)}", remedy) from error
    finally:
        spawn.get_preparation_data = prepare


def _refuse_spawn(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} is started by spawn or forkserver and cannot import this file: start processes "
        'with multiprocessing.get_context("fork")'
    )


def _describe(error: BaseException) -> str:
    """Kind, message and innermost line of an exception of the user's code."""
    # A call with the wrong arguments fails here, and not in the user's file.
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__
    ]
    place = ""
    if frames:
        innermost = frames[-1]
        place = f" (line {innermost.lineno} of {Path(innermost.filename).name})"
    return f"{type(error).__name__}: {error}{place}"


def _try(events: Emitter) -> None:
    """Tries the function that the command line names; the function may end the process."""
    module, code, function, argument = sys.argv[1:]
    importlib.import_module(module).try_file(Path(code), function, json.loads(argument))
    events.info("tried")


if __name__ == "__main__":
    run_program(_try)

import pytest

from verl.utils.config import ConfigError
from verl.utils.user_code import load_from_file


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import math\n\ndef score():\n    return math.pi\n\ndef _hidden():\n    pass\n")
    return path


def test_a_function_is_loaded_from_a_file(user_file):
    assert load_from_file(user_file, "score", key="section")() > 3


def test_a_missing_name_lists_what_the_file_defines(user_file):
    with pytest.raises(ConfigError, match=r"section.name='reward' is not defined in .*mine.py. Known: score\."):
        load_from_file(user_file, "reward", key="section")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"section.path=.*nothing.py: no such file"):
        load_from_file(tmp_path / "nothing.py", "score", key="section")


@pytest.mark.parametrize("code", ["def score(:\n", "import no_such_module\n"])
def test_a_file_that_fails_is_named_with_its_own_error_as_the_cause(tmp_path, code):
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match="broken.py' cannot be loaded: ") as info:
        load_from_file(path, "score", key="section")
    assert isinstance(info.value.__cause__, SyntaxError | ModuleNotFoundError)

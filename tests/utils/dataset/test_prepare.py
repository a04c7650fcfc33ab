"""`python -m verl.utils.data prepare`: from the columns of public data sets to samples that train."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pictures import in_bytes, noise
from verl.utils.data import main, number_at_the_end, what_is_boxed
from verl.utils.dataset.files import Rows
from verl.utils.dataset.schema import sample
from verl.utils.reward_score import default_compute_score
from verl.workers.config import DataConfig

GSM8K = [
    {"question": "Tom has 2 apples and buys 3. How many?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "What do 12 boxes of 100 make?", "answer": "12*100=1200\n#### 1,200"},
    {"question": "It was 3 degrees and fell by 10.", "answer": "3-10=-7\n#### -7"},
]
MATH = [
    {"problem": "Half of one?", "level": "Level 1", "type": "Algebra", "solution": "So $\\boxed{\\frac{1}{2}}$."},
    {"problem": "Pair?", "level": "Level 2", "type": "Algebra", "solution": "$\\boxed{1}$, no: $\\boxed{(1, 2)}$"},
]
GEO3K = [
    {"problem": "<image>Find x.", "answer": "3 \\sqrt{5}", "images": in_bytes(noise(1))},
    {"problem": "<image> and <image>?", "answer": "58.4", "images": in_bytes(noise(2), noise(3))},
]
TRUTHS = {"gsm8k": ["5", "1200", "-7"], "math": ["\\frac{1}{2}", "(1, 2)"]}
SOURCES = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(("name", "rows", "write"), [("gsm8k", GSM8K, lines), ("math", MATH, parquet)])
def test_samples_are_verls_and_the_rule_calls_their_own_solutions_right(tmp_path, capsys, name, rows, write, suffix):
    source, target = write(tmp_path / "source", rows), tmp_path / "made" / f"test.{suffix}"
    assert main(["prepare", name, "--from", str(source), "--to", str(target), "--split", "test"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{target}: {len(rows)} samples of {SOURCES[name]}\n"
    assert not told.err
    made = Rows([target], ("prompt", "data_source", "reward_model"))
    found = [sample(row, DataConfig()) for row in made.read(0, len(made))]
    assert [each["reward_model"] for each in found] == [
        {"style": "rule", "ground_truth": truth} for truth in TRUTHS[name]
    ]
    for index, (each, row) in enumerate(zip(found, rows, strict=True)):
        question, solution = list(row.values())[0], list(row.values())[-1]
        assert each["data_source"] == SOURCES[name]
        assert each["ability"] == "math"
        assert each["prompt"][0]["role"] == "user"
        assert each["prompt"][0]["content"].startswith(f"{question} Reason step by step")
        assert each["extra_info"] == {"split": "test", "index": index, "question": question, "answer": solution}
        assert default_compute_score(SOURCES[name], solution, TRUTHS[name][index]) == 1.0


def test_an_instruction_of_ones_own_follows_the_question_or_none(tmp_path):
    source = lines(tmp_path / "source", GSM8K[:1])
    for text, expected in (
        ("End with #### N.", f"{GSM8K[0]['question']} End with #### N."),
        ("", GSM8K[0]["question"]),
    ):
        target = tmp_path / "made.jsonl"
        assert main(["prepare", "gsm8k", f"--from={source}", f"--to={target}", "--instruction", text, "--force"]) == 0
        assert json.loads(target.read_text())["prompt"] == [{"role": "user", "content": expected}]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"question": "a", "anwer": "b"}], (), "has no column 'answer'. Did you mean 'anwer'?"),
        (
            [GSM8K[0], {"question": "a", "answer": "5"}, {"question": "a", "answer": "#### many"}],
            (),
            "line 2 of {source}: column 'answer' has no number after ####: '5' (2 of 3 rows are like that)",
        ),
        ([{"question": None, "answer": "#### 5"}], (), "column 'question' is null, not text"),
        (GSM8K, ("--to", "made.csv"), "--to made.csv: the name has to end in .parquet or .jsonl"),
        (GSM8K, ("--to", "{source}.jsonl"), "{source}.jsonl is there; --force replaces it"),
    ],
)
def test_what_cannot_be_prepared_is_one_line_and_nothing_is_written(tmp_path, capsys, rows, options, message):
    source = lines(tmp_path / "source", rows)
    (tmp_path / "source.jsonl").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    filled = [option.format(source=source) for option in options] or ["--to", str(tmp_path / "made.parquet")]
    assert main(["prepare", "gsm8k", "--from", str(source), *filled]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message.format(source=source) in told
    assert told.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "source.jsonl").read_text() == "mine"


def test_a_file_that_is_not_there_says_that_nothing_is_downloaded(tmp_path, capsys):
    assert main(["prepare", "math", "--from", str(tmp_path / "none")]) == 2
    assert "no such file. Data sets are not downloaded" in capsys.readouterr().err


def test_solutions_that_the_rule_does_not_reward_are_counted(tmp_path, capsys):
    source = lines(tmp_path / "source", [{"question": "Price?", "answer": "#### $18"}, GSM8K[0]])
    assert main(["prepare", "gsm8k", "--from", str(source), "--to", str(tmp_path / "made.jsonl")]) == 0
    assert "no full reward to 1 of the data set's own solutions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "solution", "truth"),
    [
        (number_at_the_end, "#### 1\nno, #### 2", "2"),
        (number_at_the_end, "it is 5 ####  $1,000 ", "1000"),
        (number_at_the_end, "#### 5\nwhich is right", "5"),
        (number_at_the_end, "####", None),
        (number_at_the_end, "5", None),
        (what_is_boxed, "\\boxed{\\sqrt{2}}", "\\sqrt{2}"),
        (what_is_boxed, "\\boxed 7$", "7"),
        (what_is_boxed, "\\fbox{7}", None),
        (what_is_boxed, "\\boxed{7", None),
    ],
)
def test_the_truth_is_read_from_the_solution(read, solution, truth):
    assert read(solution) == truth


def test_questions_about_pictures_keep_them_and_their_marks(tmp_path, capsys):
    source, target = parquet(tmp_path / "source.parquet", GEO3K), tmp_path / "made.parquet"
    assert main(["prepare", "geo3k", "--from", str(source), "--to", str(target)]) == 0
    assert capsys.readouterr().err == ""
    made = Rows([target], ("prompt", "data_source", "reward_model"))
    for index, (each, row) in enumerate(zip(made.read(0, 2), GEO3K, strict=True)):
        found = sample(each, DataConfig(), unseen={})
        assert found["images"] == row["images"]
        assert found["prompt"][0]["content"].startswith(f"{row['problem']} Reason step by step within <think>")
        assert found["reward_model"] == {"style": "rule", "ground_truth": row["answer"]}
        assert found["extra_info"] | {"index": index} == found["extra_info"]
        right = f"<think>a</think> \\boxed{{{row['answer']}}}"
        assert default_compute_score("hiyouga/geometry3k", right, row["answer"]) == 1.0


def test_a_question_with_other_marks_than_pictures_is_named(tmp_path, capsys):
    source = parquet(tmp_path / "source.parquet", [GEO3K[0], {**GEO3K[1], "problem": "<image>?"}])
    assert main(["prepare", "geo3k", "--from", str(source), "--to", str(tmp_path / "made.parquet")]) == 2
    assert "row 1 of" in (told := capsys.readouterr().err)
    assert "column 'problem' has 1 marks <image> for 2 pictures" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arguments", "{seed: 1}"), "--arguments: '{seed: 1}' is not JSON"),
        (("--limit", "-3"), "--limit: '-3' is not a number from 1"),
        (("--test-size", "0"), "--test-size: '0' is not a number from 1"),
    ],
)
def test_options_of_an_environment_that_cannot_be_are_named(capsys, words, message):
    with pytest.raises(SystemExit) as ended:
        main(["prepare", "verifiers", "--environment", "any", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err

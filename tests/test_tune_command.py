"""`python -m mlx_phase.tune`: options, dry run, a whole run with a fake clock."""

import pytest
from tune_world import World

import mlx_phase
from mlx_phase import tune, tune_store
from mlx_phase.bench import BenchError
from mlx_phase.models import load


@pytest.mark.parametrize(
    "text, rows", [("1", (1,)), ("16, 2,1", (1, 2, 16)), ("3,7", (3, 7))]
)
def test_rows(text, rows):
    assert tune.numbers(text) == rows


@pytest.mark.parametrize("text", ["", "0", "17", "1,,2", "a", "-1", "1.5"])
def test_rows_are_refused_with_a_reason(text):
    with pytest.raises(BenchError, match="1 to 16"):
        tune.numbers(text)


def test_on_the_cpu_nothing_is_raced_or_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path / "plans"))
    monkeypatch.setattr(tune, "Referee", None)
    assert tune.main(["--model", "tiny", "--rows", "1,4"]) == 0
    text = capsys.readouterr().out
    assert "dry run" in text and "qmv_pair" in text and "nothing is stored" in text
    assert not (tmp_path / "plans").exists()


def test_a_run_on_a_gpu_stores_what_patch_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    world = World(lambda problems, p: 9 if p else 20 * len(problems))
    monkeypatch.setattr(tune, "executor_name", lambda: "apple")
    monkeypatch.setattr(tune, "Referee", lambda effort: world.referee())
    options = "--model tiny:layers=1 --rows 1,4".split()
    assert tune.main(options) == 0
    first = capsys.readouterr().out
    assert "10 raced, 0 were stored already" in first and "kernel" in first
    assert tune.main([*options, "--resume"]) == 0
    assert "0 raced, 10 were stored" in capsys.readouterr().out
    report = mlx_phase.patch(load("tiny:layers=1").model, check=False)
    assert "10 races won, 0 to stock" in report.tune
    # tune itself looked at the built-in plans only, and left none of its own.
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_keeps_what_was_raced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    world = World(lambda problems, p: 9 if p else 20)
    monkeypatch.setattr(tune, "executor_name", lambda: "apple")
    probes = iter([1.0] * 6)

    def probe():
        try:
            return next(probes)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(tune, "Referee", lambda *_: world.referee(probe=probe))
    assert tune.main("--model tiny:layers=1".split()) == 130
    assert "--resume" in capsys.readouterr().err
    assert len(list(tune_store.lookup().plans)) == 3


@pytest.mark.parametrize(
    "options, words",
    [
        ("--rows 99", "1 to 16"),
        ("--repeats 2", "3 or more"),
        ("--budget 0", "above 0"),
        ("--model tiny:bits=32", "nothing to tune"),
        ("--model nonsense", "unknown model"),
        ("--export /nowhere/x.json", "nothing to export"),
        ("--import /nowhere/x.json", "No such file"),
    ],
)
def test_bad_input_is_one_line(options, words, capsys):
    assert tune.main(options.split()) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_launches_of_a_model_are_those_that_patch_makes():
    name, found = tune.launches("tiny")
    shapes = [tuple((p.K, p.N) for p in problems) for problems in found]
    assert name == "tiny" and len(set(shapes)) == len(shapes)
    assert ((256, 768), (256, 768)) in shapes and ((768, 256),) in shapes
    assert ((256, 256), (256, 128), (256, 128)) in shapes
    assert all(p.M == 1 for problems in found for p in problems)

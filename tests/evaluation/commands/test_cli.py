"""The command line answers bad input with one line and exit code 2, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dgm_infer import Draws
from dgm_infer.kernels import ConstrainedHMC
from evaluation.benchmarks import BENCHMARKS
from evaluation.commands import answers, outline
from evaluation.commands.cli import main
from evaluation.commands.inputs import read_images
from evaluation.commands.messages import one_line
from evaluation.commands.options import with_class_paths
from evaluation.experiments import EXPERIMENTS
from tests.pages import whole
from tests.quick import some

ROOT = Path(__file__).parents[3]
TRAIN = ROOT / "configs" / "train" / "digits_vae.yaml"
EVIDENCE = str(ROOT / "configs" / "evidence" / "digits_vae.yaml")

CONFIG = """\
name: small
generator: digits_vae
images: trainers.DigitsData
n_images: 2
kernel:
  n_steps: [2, 3]
  n_geodesic: 2
  step_size: 0.1
chains: 2
warmup: 0
draws: 6
seed: 1
"""
# with annealed starts, which take most of the time, and a step size that is adapted
WARM = ["--warmup", "5", "--kernel.step_size", "null"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def condition(config, *options):
    return main(["condition", "--config", str(config), *options])


def test_condition_writes_a_complete_run_folder(config, tmp_path, capsys):
    assert condition(config) == 0
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "posterior.nc",
        "summary.csv",
        "completions.png",
        "traces.png",
        "log.txt",
        "images",
        "report.html",
    }
    page = whole((folder / "report.html").read_text())
    assert len(page.addresses) == 2
    diagnosis = str(Draws.load(folder / "posterior.nc").diagnose())
    # what is not compared with the observation is in the report all the same
    assert outline.in_words_of("condition", diagnosis.splitlines()[0].split(":")[0]) in page.words
    assert f"--config {folder.relative_to(tmp_path) / 'config.yaml'} --draws 12" in page.words
    draws = Draws.load(folder / "posterior.nc")
    assert draws.shape == (2, 6, 2)
    said = capsys.readouterr().out
    assert "R-hat" in said
    there = ", ".join(sorted(path.name for path in folder.iterdir()))
    assert said.strip().endswith(f"results in {folder.relative_to(tmp_path)}: {there}")


@pytest.mark.slow
def test_the_resolved_configuration_repeats_the_run(config, tmp_path):
    assert condition(config) == 0
    (first,) = (tmp_path / "runs" / "small").iterdir()
    assert condition(first / "config.yaml", "--name", "again") == 0
    (second,) = (tmp_path / "runs" / "again").iterdir()
    assert torch.equal(Draws.load(first / "posterior.nc").inputs, Draws.load(second / "posterior.nc").inputs)


OWN_KERNEL = """\
import dgm_infer as dgm


class Careful(dgm.ConstrainedHMC):
    def step(self, problem, state, rng):
        print("a careful step")
        return super().step(problem, state, rng)
"""


@pytest.mark.slow
def test_a_kernel_is_named_by_class_path_in_the_working_directory_too(config, tmp_path, capsys):
    (tmp_path / "own_kernel.py").write_text(OWN_KERNEL)
    kernel = "kernel: {class_path: own_kernel.Careful, init_args: {n_steps: [2, 3], n_geodesic: 2, step_size: 0.1}}\n"
    config.write_text(CONFIG.replace("kernel:\n  n_steps: [2, 3]\n  n_geodesic: 2\n  step_size: 0.1\n", kernel))
    assert condition(config) == 0
    assert "a careful step" in capsys.readouterr().out


def _npy(name, array):
    np.save(name, array)
    return name


BAD = {
    "unknown command": lambda c: (["conditon"], "did you mean 'condition'"),
    "unknown key": lambda c: (["condition", "--config", _append(c, "chainz: 3")], "did you mean 'chains'"),
    "unknown nested key": lambda c: (["condition", "--config", _append(c, "kernel: {n_stepz: 3}")], "n_steps"),
    "abbreviated option": lambda c: (["condition", "--config", c, "--chain", "3"], "--chain 3"),
    "wrong type": lambda c: (["condition", "--config", c, "--chains", "many"], "many"),
    "missing file": lambda c: (["condition", "--config", "absent.yaml"], "absent.yaml"),
    "no options": lambda c: (["condition"], "name, generator, images"),
    "YAML": lambda c: (["condition", "--config", _append(c, "x: [")], "config"),
    "zero chains": lambda c: (["condition", "--config", c, "--chains", "0"], "chains=0"),
    "zero images": lambda c: (["condition", "--config", c, "--n_images", "0"], "n_images"),
    "unknown kernel": lambda c: (["condition", "--config", c, "--kernel", "dgm_infer.NUTZ"], "dgm_infer.NUTZ"),
    "no kernel": lambda c: (["condition", "--config", c, "--kernel", "dgm_infer.Draws"], "dgm_infer.Draws"),
    "unsuited kernel": lambda c: (["condition", "--config", c, "--kernel", "dgm_infer.NUTS"], "NUTS samples a Target"),
    "illegal kernel by class path": lambda c: (
        ["condition", "--config", _append(c, "latent_kernel: {class_path: dgm_infer.NUTS, init_args: {n_steps: 0}}")],
        "NUTS(n_steps=0)",
    ),
    "unknown key of a kernel by class path": lambda c: (
        ["condition", "--config", _append(c, "latent_kernel: {class_path: dgm_infer.NUTS, init_args: {n_stepz: 3}}")],
        "did you mean 'n_steps'",
    ),
    "illegal kernel": lambda c: (["condition", "--config", c, "--kernel.n_geodesic", "0"], "n_geodesic=0"),
    "unknown generator": lambda c: (["condition", "--config", c, "--generator", "digit_vae"], "digits_vae"),
    "missing checkpoint": lambda c: (["condition", "--config", c, "--generator", "absent.ckpt"], "absent.ckpt"),
    "foreign checkpoint": lambda c: (["condition", "--config", c, "--generator", _foreign()], "foreign.ckpt"),
    "trusted file": lambda c: (
        ["condition", "--config", _append(c, f"generator: {_trusting()}")],
        "trust=True: no command lets foreign.ckpt run its code",
    ),
    "trusted file to train": lambda c: (
        ["train", "--config", str(TRAIN), "--model.generator", _trusting()],
        "trust=True: no command lets foreign.ckpt run its code",
    ),
    "class path of another kind": lambda c: (
        ["condition", "--config", _append(c, "generator: {class_path: torch.nn.ReLU}")],
        "GenerativeModel",
    ),
    "unknown mask": lambda c: (["condition", "--config", c, "--observe", "upper"], "top_half"),
    "mask of another shape": lambda c: (
        ["condition", "--config", c, "--observe", _npy("mask.npy", np.ones((3, 3), bool))],
        "(3, 3)",
    ),
    "missing images": lambda c: (["condition", "--config", c, "--images", "absent.npy"], "absent.npy"),
    "NaN pixels": lambda c: (["condition", "--config", c, "--images", _npy("nan.npy", _images(np.nan))], "nan"),
    "infinite pixels": lambda c: (["condition", "--config", c, "--images", _npy("inf.npy", _images(np.inf))], "inf"),
    "too few images": lambda c: (["condition", "--config", c, "--images", _npy("one.npy", np.zeros((1, 8, 8)))], "1"),
    "images of another shape": lambda c: (
        ["condition", "--config", c, "--images", _npy("big.npy", np.zeros((2, 28, 28)))],
        "(2, 28, 28)",
    ),
    "array of words": lambda c: (
        ["condition", "--config", c, "--images", _npy("words.npy", np.array(["a"]))],
        "words.npy",
    ),
    "name that leads elsewhere": lambda c: (["condition", "--config", c, "--name", "../x"], "'../x'"),
    "no name": lambda c: (["condition", "--config", c, "--name", ""], "name"),
    "output that is a file": lambda c: (["condition", "--config", c, "--output", c], "output"),
    "device that there is none of": lambda c: (["condition", "--config", c, "--device", "gpu7"], "gpu7"),
    "negative seed": lambda c: (["condition", "--config", c, "--seed", "-1"], "seed=-1"),
    "class path of nothing": lambda c: (["condition", "--config", c, "--generator", "mine.Nope"], "class path"),
    "name that a module lacks": lambda c: (
        ["condition", "--config", c, "--generator", "generators.Nope"],
        "generators.py has no 'Nope'",
    ),
    "number with a comma in a file": lambda c: (
        ["condition", "--config", _append(c, 'noise: "0,1"')],
        "noise: Expected a float, not 0,1",
    ),
    "export where no folder can be": lambda c: (
        ["train", "--config", str(TRAIN), "--export.path", f"{c}/x", "--trainer.max_epochs", "1"],
        "export.path",
    ),
    "training without a model": lambda c: (["train", "--trainer.max_epochs", "1"], "model"),
    "no images": lambda c: (
        ["evidence", "--config", EVIDENCE, "--images", "absent.png"],
        "images: absent.png does not exist",
    ),
    "no number": lambda c: (
        ["evidence", "--config", EVIDENCE, "--chains", "many"],
        "chains: 'many' is not a whole number",
    ),
    "unknown group": lambda c: (["train", "--modell.x", "1"], "did you mean 'model'"),
    "option before the name": lambda c: (["bench", "--seconds", "1"], "the name comes first"),
    "unknown benchmark": lambda c: (["bench", "fibr"], "did you mean 'fibre'"),
    "unknown option of a benchmark": lambda c: (["bench", "fibre", "--second", "1"], "did you mean 'seconds'"),
    "runs of nowhere": lambda c: (["runs", "nowhere"], "nowhere is not a folder"),
    "unknown option of runs": lambda c: (["runs", "--all"], "--all"),
    "unknown short name": lambda c: (["condition", "--config", c, "--kernel", "NUTZ"], "did you mean 'NUTS'"),
    "unknown short name in a list": lambda c: (
        ["evidence", "--config", EVIDENCE, "--methods", "AIZ"],
        "no AIZ in dgm_infer.evidence; did you mean 'AIS'",
    ),
    "unknown experiment": lambda c: (["reproduce", "quantiles"], "did you mean 'quantile'"),
    "abbreviated option of an experiment": lambda c: (["reproduce", "quantile", "--fas"], "did you mean 'fast'"),
    "experiment with a seed of another type": lambda c: (["reproduce", "quantile", "--seed", "one"], "one"),
    "experiment with a negative seed": lambda c: (["reproduce", "quantile", "--seed", "-1"], "seed=-1"),
    "experiment with absent data": lambda c: (["reproduce", "quantile", "--data", "absent"], "absent"),
    "experiment with an output that is a file": lambda c: (["reproduce", "quantile", "--output", c], "output"),
    "unknown training option": lambda c: (["train", "--trainer.max_epoch", "1"], "max_epoch"),
}


def _append(config, line):
    path = os.path.join(os.path.dirname(config), "appended.yaml")
    with open(config) as old, open(path, "w") as new:
        text = re.sub(rf"^{line.split(':')[0]}:.*\n(  .*\n)*", "", old.read(), flags=re.MULTILINE)
        new.write(text + line + "\n")
    return path


def _foreign():
    torch.save({"state_dict": {}}, "foreign.ckpt")
    return "foreign.ckpt"


def _trusting():
    return f"{{class_path: generators.load, init_args: {{name: {_foreign()}, trust: true}}}}"


def _images(value):
    images = np.zeros((2, 8, 8))
    images[1, 2, 3] = value
    return images


# what the library itself says to these is tested there
SAID_BY_THE_LIBRARY = {
    "zero chains",
    "zero images",
    "unsuited kernel",
    "illegal kernel",
    "illegal kernel by class path",
    "missing checkpoint",
    "foreign checkpoint",
    "mask of another shape",
    "NaN pixels",
    "infinite pixels",
    "too few images",
    "images of another shape",
    "array of words",
    "device that there is none of",
    "negative seed",
    "experiment with a negative seed",
}


@pytest.mark.parametrize("case", some(BAD, quick=BAD.keys() - SAID_BY_THE_LIBRARY))
def test_bad_input_gets_one_line_and_exit_code_2(case, config, tmp_path, capsys):
    arguments, named = BAD[case](str(config))
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0, error
    assert error.startswith("dgm-infer")
    assert named in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_interrupt_while_sampling_keeps_the_draws(config, tmp_path, capsys, monkeypatch):
    step, calls = ConstrainedHMC.step, 0

    def interrupted(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(ConstrainedHMC, "step", interrupted)
    assert condition(config, "--draws", "200") == 130
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    draws = Draws.load(folder / "posterior.nc")
    assert draws.interrupted
    assert draws.shape[1] == 19
    said = capsys.readouterr()
    assert "(interrupted)" in said.out
    assert f"{folder.relative_to(tmp_path)} keeps what was finished" in said.err
    assert "dgm-infer condition: interrupted" in said.err


def test_an_interrupt_during_warmup_leaves_nothing(config, tmp_path, capsys, monkeypatch):
    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ConstrainedHMC, "step", interrupted)
    assert condition(config, *WARM) == 130
    assert not (tmp_path / "runs").exists()
    assert "interrupted" in capsys.readouterr().err


# what either signal leaves is tested in test_keeping
@pytest.mark.slow
def test_a_signal_reaches_a_running_command(config, tmp_path):
    command = [
        sys.executable,
        "-m",
        "evaluation.commands.cli",
        "condition",
        "--config",
        str(config),
        "--draws",
        "100000",
        # a signal waits for the compiler
        "--kernel.compile",
        "false",
    ]
    with open(tmp_path / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            # a shell that runs the tests in the background makes its children ignore interrupts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        deadline = time.monotonic() + 120
        while b"sampling" not in (tmp_path / "stderr.txt").read_bytes():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"(interrupted)" in output
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert Draws.load(folder / "posterior.nc").shape[1] < 100000


def test_help_and_version(capsys):
    assert main([]) == 0
    assert main(["--version"]) == 0
    assert "condition" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "listed"), [("reproduce", EXPERIMENTS), ("bench", BENCHMARKS)])
@pytest.mark.parametrize("asked", [[], ["--help"]])
def test_what_runs_by_name_lists_itself_with_a_line_each(command, listed, asked, capsys):
    assert main([command, *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in listed:
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 4


@pytest.mark.parametrize("command", outline.COMMANDS)
def test_the_help_of_a_command_is_short_and_has_three_examples(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count(f"\n  dgm-infer {command}") == 3
    assert "torch.nn" not in text
    assert len(text.splitlines()) < 100


def test_the_help_of_a_command_describes_every_option(capsys):
    main(["condition", "--help"])
    text = capsys.readouterr().out
    for option in outline.options_of("evaluation.commands.condition", "condition_images"):
        assert (f"  --{option.name} " in text) == (option.name != "resolved")
        assert option.help
    assert "--measured true|false" in text
    main(["reproduce", "quantile", "--help"])
    assert "  --fast\n" in capsys.readouterr().out
    assert "--chains N\n      chains per image (default: 16)" in text


@pytest.mark.slow
def test_the_options_of_training_are_those_of_its_parser():
    from evaluation.commands import train  # loads Lightning

    class Parser(train.TrainCLI):
        def parse_arguments(self, parser, args):
            raise KeyError(*vars(self._subcommand_parsers["fit"].get_defaults()))

    with pytest.raises(KeyError) as found:
        Parser([])
    assert {option.name for option in outline.options_of_training()} == set(found.value.args)


@pytest.mark.parametrize(
    ("line", "completed"),
    [("cond", "condition"), ("condition --n", "--name --n_images --noise"), ("reproduce qu", "quantile")],
)
def test_bash_completes_commands_and_options(line, completed, capsys):
    assert main(["--completion"]) == 0
    words = f"dgm-infer {line}".split()
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _dgm_infer; echo ${{COMPREPLY[*]}}"
    script = capsys.readouterr().out + ask
    assert subprocess.check_output(["bash", "-c", script], text=True).split() == completed.split()


FEW = {
    "help": ["--help"],
    "help of a command": ["condition", "--help"],
    "wrong option": ["condition", "--chainz", "3"],
    "missing file": ["train", "--config", "absent.yaml"],
    "list": ["bench"],
    "runs": ["runs", "nowhere"],
}


@pytest.mark.parametrize("arguments", FEW.values(), ids=FEW)
def test_what_needs_no_torch_is_answered_without_it(arguments, tmp_path):
    code = f"import sys; from evaluation.commands.cli import main; main({arguments!r}); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith("False\n")


def test_shipped_configurations_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "configs/condition/digits_top_half.yaml"
    found = answers.shipped(["--config", name, f"--config={name}", "configs/none.yaml", "--name=configs/x"])
    assert found == ["--config", str(ROOT / name), f"--config={ROOT / name}", "configs/none.yaml", "--name=configs/x"]
    # and the pictures that they name
    pictures = read_images("configs/condition/garments", 3, (28, 28))
    assert pictures.shape == (3, 28, 28)
    assert pictures.flatten(1).std(1).min() > 0.1
    # one's own comes first
    Path("configs/condition").mkdir(parents=True)
    Path(name).write_text("name: own\n")
    assert answers.shipped([name]) == [name]


def test_short_names_of_classes_are_those_of_their_rooms(tmp_path):
    kernels, evidence = "dgm_infer.kernels", "dgm_infer.evidence"
    given = ["--kernel", "NUTS", "--methods", "AIS,SMC", "--methods+=AIS", "--methods+", "AIS", "--images=DigitsData"]
    assert with_class_paths(given) == [
        "--kernel",
        f"{kernels}.NUTS",
        "--methods",
        f'["{evidence}.AIS", "{evidence}.SMC"]',
        f"--methods+={evidence}.AIS",
        "--methods+",
        f"{evidence}.AIS",
        "--images=trainers.DigitsData",
    ]
    same = ["--name", "NUTS", "--generator", "digits_vae", "--kernel", "own.Kernel", "--methods", "null", "--seed=1"]
    assert with_class_paths(same) == same
    file = tmp_path / "c.yaml"
    file.write_text(
        "kernel: {class_path: NUTS, init_args: {step_size: 0.1}}  # NUTS\nmethods: [AIS, {class_path: SMC}]\n"
    )
    assert with_class_paths(["--config", str(file)])[1] == (
        f"kernel: {{class_path: {kernels}.NUTS, init_args: {{step_size: 0.1}}}}  # NUTS\n"
        f"methods: [{evidence}.AIS, {{class_path: {evidence}.SMC}}]\n"
    )
    file.write_text("name: NUTS\n")
    assert with_class_paths([f"--config={file}"]) == [f"--config={file}"]


def test_runs_are_listed_with_a_line_each(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert main(["runs"]) == 0
    for name, log in (("old", "2 images, R-hat 1.01\nmore"), ("new", None)):
        folder = Path("runs", name, "2026-01-01_00-00-00")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("name: x\n")
        if log:
            (folder / "log.txt").write_text(log)
        when = {"old": 1e9, "new": 2e9}[name]
        os.utime(folder, (when, when))
    assert main(["runs"]) == 0
    nothing, new, old = capsys.readouterr().out.splitlines()
    assert nothing == "no runs in runs"
    assert new.endswith("runs/new/2026-01-01_00-00-00  not finished")
    assert old.endswith("runs/old/2026-01-01_00-00-00  2 images, R-hat 1.01")


def test_of_a_union_the_specific_complaint_is_kept():
    message = (
        'Parser key "generator":\n  Does not validate against any of the Union subtypes\n'
        "  Subtypes: [<class 'str'>]\n"
        "  Errors:\n    - Expected a <class 'str'>\n    - No module named 'mine'\n  Given value type: <class 'dict'>"
    )
    assert one_line(message) == "generator: No module named 'mine'"


def test_an_installation_without_benchmarks_says_where_they_are(monkeypatch, capsys):
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    assert main(["bench", "fibre"]) == 2
    assert capsys.readouterr().err == (
        "dgm-infer bench: error: benchmarks are not part of the installed package: run this in a clone of the "
        "repository\n"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("chains: 3", "'chains' is there twice"),
        ("thin: 1:30", "1:30 is not a decimal number in YAML"),
        ("thin: 010", "010 is not a decimal number in YAML"),
    ],
)
@pytest.mark.parametrize("command", ["condition", "train"])
def test_a_value_that_yaml_reads_as_another_is_refused_with_its_line(line, words, command, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG + line + "\n")
    assert main([command, "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert f"line {CONFIG.count(chr(10)) + 1}" in said
    assert said.count("\n") == 1


def test_a_configuration_that_is_not_text_is_refused(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["condition", f"--config={file}"]) == 2
    assert "is not text" in capsys.readouterr().err

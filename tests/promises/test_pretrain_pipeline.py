"""The pipeline template learns what templates/pretrain.py learns, and either continues the other's checkpoints."""

import itertools
import shutil

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig, GraniteConfig

from shared.config import parse as configs
from shared.process.errors import ConfigError
from tests.conftest import learn_here, load_template, run, slow
from tests.same import assert_same_learning

SHAPE = "hidden_size=64,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"
STEPS, SAVED = 6, 3


@pytest.fixture(scope="module")
def flags(text_file):
    return (
        *("--train_file", text_file, "--vocab_size", 320, "--seq_length", 32, "--max_steps", STEPS, "--save_steps", SAVED),
        *("--save_total_limit", 9, "--eval_samples", 9, "--global_batch_size", 24, "--max_grad_norm", 0.5),
        *("--learning_rate", 3e-3),
        *("--config_overrides", SHAPE + ",tie_word_embeddings=false"),
    )


@pytest.fixture(scope="module")
def plain(flags, tmp_path_factory):
    return learn_here("pretrain", tmp_path_factory.mktemp("plain"), *flags, "--per_device_train_batch_size", 4)


@pytest.fixture(scope="module")
def pipeline(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    return run("pretrain_pipeline", folder, *flags, "--per_device_train_batch_size", 4, processes=2)


def parameters(output: str) -> list[int]:
    """(those that the first rank holds, those of the whole model), from the summary."""
    lines = [line for line in output.splitlines() if line.endswith(" parameters")]
    return [int(line.split()[-2].replace(",", "")) for line in lines]


@pytest.mark.parametrize(
    ("processes", "extra", "name"),
    [
        (2, None, "PP 2 x DDP 1"),
        slow(4, ("--per_device_train_batch_size", 2), "PP 2 x DDP 2"),
        slow(4, ("--pipeline_ranks", 4), "PP 4 x DDP 1"),
    ],
    ids=["1f1b", "two-pipelines", "four-ranks"],
)
def test_learns_what_one_process_learns(plain, pipeline, flags, tmp_path, processes, extra, name):
    """An epoch of this set ends in a smaller batch within these steps: its missing micro-batches count for nothing."""
    given = (*flags, "--per_device_train_batch_size", 4)
    done = run("pretrain_pipeline", tmp_path, *given, *extra, processes=processes) if extra else pipeline
    manifest = done.manifest(STEPS)
    assert manifest["world_size"] == processes and manifest["strategy"] == f"{name} on cpu, fp32"
    own, whole = sorted(parameters(done.summary))
    assert own < whole / 1.5
    assert len({after - before for before, after in itertools.pairwise(plain.each("tokens"))}) == 2
    assert done.each("grad_norm") == pytest.approx(plain.each("grad_norm"), rel=1e-4)
    assert_same_learning(plain, done)
    _, loading = AutoModelForCausalLM.from_pretrained(done.folder / "final", output_loading_info=True)
    assert not loading["missing_keys"]


def test_continues_what_one_process_has_saved(plain, flags, tmp_path):
    start = ("--resume_from_checkpoint", plain.folder / f"checkpoint-{SAVED:06d}", "--per_device_train_batch_size", 4)
    resumed = run("pretrain_pipeline", tmp_path, *flags, *start, processes=2)
    assert f"at step {SAVED}" in resumed.output
    assert resumed.losses == pytest.approx({s: v for s, v in plain.losses.items() if s > SAVED}, rel=1e-5)


@pytest.mark.parametrize(("processes", "config"), [(1, None), slow(2, "fsdp2")])
def test_any_other_continues_what_a_pipeline_has_saved(pipeline, flags, tmp_path, processes, config):
    start = ("--resume_from_checkpoint", pipeline.folder / f"checkpoint-{SAVED:06d}", "--per_device_train_batch_size", 4)
    resumed = run("pretrain", tmp_path, *flags, *start, processes=processes, config=config)
    assert resumed.losses == pytest.approx({s: v for s, v in pipeline.losses.items() if s > SAVED}, rel=1e-5)


@pytest.mark.slow
def test_keeps_weights_and_generation_settings_of_a_model_that_it_continues(pipeline, flags, tmp_path):
    shutil.copytree(pipeline.folder / "final", tmp_path / "model")
    GenerationConfig(eos_token_id=[1, 2], max_new_tokens=7).save_pretrained(tmp_path / "model")
    given = [f for f in flags if f not in ("--config_overrides", flags[-1])]
    given += ["--model_name_or_path", tmp_path / "model", "--per_device_train_batch_size", 4, "--max_steps", 1]
    done = run("pretrain_pipeline", tmp_path / "run", *given, processes=2)
    # Its weights, too: the first evaluation is the last of the run that made them.
    assert done.each("eval_loss")[0] == pytest.approx(pipeline.last("eval_loss"), rel=1e-5)
    kept = GenerationConfig.from_pretrained(done.folder / "final")
    assert (kept.eos_token_id, kept.max_new_tokens) == ([1, 2], 7)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_known"), [("logits_scaling", True), ("embedding_multiplier", False)])
def test_what_a_model_does_to_its_logits_is_measured_and_anything_else_refused(flags, tmp_path, scale, is_known):
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    GraniteConfig(**shape, **{scale: 8.0}, tie_word_embeddings=False).save_pretrained(tmp_path / "a")
    given = [f for f in flags if f not in ("--config_overrides", flags[-1])]
    given += ["--config_name", tmp_path / "a", "--per_device_train_batch_size", 4, "--max_steps", 2]
    done = run("pretrain_pipeline", tmp_path / "run", *given, processes=2, check=is_known)
    if is_known:
        plain = learn_here("pretrain", tmp_path / "plain", *given)
        assert len(done.losses) == 2 and done.losses == pytest.approx(plain.losses, rel=1e-5)
    else:
        assert done.output.count("error: GraniteForCausalLM cannot be cut into pipeline stages") == 1


@pytest.mark.slow
def test_evaluates_without_dropout(plain, flags, tmp_path):
    given = [f if f != flags[-1] else f + ",attention_dropout=0.4" for f in flags]
    given += ["--per_device_train_batch_size", 4, "--max_steps", 1]
    done = run("pretrain_pipeline", tmp_path, *given, processes=2)
    assert done.each("eval_loss")[0] == pytest.approx(plain.each("eval_loss")[0], rel=1e-5)


@pytest.mark.parametrize(
    ("processes", "config", "extra", "message"),
    [
        slow(4, "hsdp", (), "a pipeline is launched with ddp.yaml"),
        slow(3, "ddp", (), "3 processes cannot be split into pipelines of 2 ranks"),
        (2, "ddp", ("--config_overrides", SHAPE + ",tie_word_embeddings=true"), "the first and the last stage cannot share"),
        slow(2, "ddp", ("--per_device_train_batch_size", "24"), "1 micro-batches do not keep 2 pipeline ranks busy"),
    ],
)
def test_what_cannot_be_spread_is_one_line(flags, tmp_path, processes, config, extra, message):
    given = (*flags, "--per_device_train_batch_size", 2, *extra)
    done = run("pretrain_pipeline", tmp_path, *given, processes=processes, config=config, check=False)
    assert done.returncode != 0 and done.output.count(f"error: {message}") == 1


def test_what_a_pipeline_would_leave_out_is_refused():
    config = load_template("pretrain_pipeline").Config
    for flag in (["--streaming"], ["--find_batch_size"], ["--dress_rehearsal"], ["--layer_decay", "0.9"]):
        with pytest.raises(ConfigError, match=f"{flag[0]}.*not with a pipeline"):
            configs.parse(config, flag)

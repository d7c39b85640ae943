"""Laws of real sizes: what sums, far ends and wide layers come to, beside float64; and that a fault in them is seen."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiers import cases

from shardtrain import cli, config
from shardtrain.distributed import grad_clip, runner
from shardtrain.ops import cross_entropy, dtensor
from shardtrain.tools.verify import real, verify_request
from shardtrain.tools.verify.real import beyond, float64, real_layers, sums, tile
from shardtrain.train import trainer
from shardtrain.utils import temporary
from shardtrain.utils.errors import ConfigError

SMALL = real.Sizes(numbers=1 << 20, far_rows=4099, far_samples=10_007, vocabularies=(1000,), tokens=256, losses=1 << 18)
PRESETS = (
    ("llama3", "8B"),
    ("llama3", "70B"),
    ("qwen3", "8B"),
    ("qwen3_moe", "30B-A3B"),
    ("mistral", "7B-v0.3"),
    ("mixtral", "8x7B"),
    ("deepseek_v3", "671B"),
    ("llama4", "17bx128e"),
    ("gpt_oss", "20b"),
    ("neox", "pythia-6.9b"),
    ("encoder", "base"),
)
"""A flavor of each family, at the width that it is trained at."""


def norm(ranks, degrees, numbers, values):
    return sums.norm_error(run_ranks(ranks, _norm, ranks, degrees, numbers // 4096, values))


def _norm(rank, ranks, degrees, rows, values):
    return sums.gradient_norm(rank, ranks, degrees, rows, 4096, values, "float32")


@pytest.mark.parametrize(("ranks", "degrees"), [(1, {}), (2, {}), (2, {"dp_replicate": 2}), (4, {"tp": 2})])
def test_the_norm_of_five_million_numbers_is_that_of_float64_on_every_mesh(ranks, degrees):
    assert norm(ranks, degrees, 5_000_000, "normal") <= real.SUM_LIMIT


@pytest.mark.parametrize("values", ["offset", "tiny", "one large"])
def test_the_norm_is_that_of_float64_whatever_the_numbers_are(values):
    assert norm(1, {}, 1_000_000, values) <= real.SUM_LIMIT


def test_a_norm_that_is_added_up_in_float32_is_seen(monkeypatch):
    # what the norm was: one chain of float32 squares for each lane, 1.3e-4 off at five million numbers
    chained = lambda tensors: torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32)).square().sum()  # noqa: E731
    monkeypatch.setattr(grad_clip, "squared_norm", chained)
    assert norm(1, {}, 5_000_000, "normal") > real.SUM_LIMIT


@pytest.mark.parametrize(("ranks", "degrees"), [(1, {}), (2, {"tp": 2}), (4, {"tp": 2})])
@pytest.mark.parametrize(("vocabulary", "tokens", "batches"), [(128_256, 32, 8), (2, 1 << 18, 256)])
def test_a_loss_over_a_real_vocabulary_or_many_tokens_is_that_of_float64(ranks, degrees, vocabulary, tokens, batches):
    found = run_ranks(ranks, sums.loss_sum, ranks, degrees, vocabulary, tokens, batches)
    assert sums.loss_error(found) <= real.SUM_LIMIT


def test_micro_batches_that_are_added_up_in_float32_are_seen(monkeypatch):
    # a float32 total takes up to 6e-8 of itself from each addition, and like sums all round alike
    def forward_backward(self, batches, weight):
        total = torch.zeros(())
        for batch in batches:
            with torch.no_grad():
                total += self._loss(batch, weight)
        return total

    monkeypatch.setattr(runner.PlainRunner, "forward_backward", forward_backward)
    assert _many_micro_batches() > real.SUM_LIMIT


def _many_micro_batches():
    return sums.loss_error(run_ranks(1, sums.loss_sum, 1, {}, 2, 1 << 12, 1 << 12))


def test_chunks_of_tokens_are_added_up_in_float64(monkeypatch):
    # a million tokens of a real vocabulary are eight thousand chunks
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", 4)
    logits = torch.zeros(1, 1 << 12, 4)
    targets = torch.zeros(1, 1 << 12, dtype=torch.int64)
    exact = (1 << 12) * math.log(4.0)
    assert abs(float(cross_entropy.cross_entropy_sum(logits, targets)) / exact - 1) < 2e-7


def test_the_far_end_of_a_tensor_of_more_than_31_bits_is_drawn_ordered_and_read_right(tmp_path):
    assert beyond.drawn(0, 1, beyond.ROWS) == {"wrong": 0}
    assert beyond.ordered(0, 1, (1 << 33) + 7) == {"wrong": 0}
    assert beyond.stored_far(0, 1, beyond.ROWS, str(tmp_path)) == {"wrong": 0}


def test_a_gradient_that_is_scaled_in_part_is_seen(monkeypatch):
    assert beyond.scaled(0, 1, 100) == {"wrong": 0}
    scale = grad_clip.scale_gradients
    monkeypatch.setattr(grad_clip, "scale_gradients", lambda ps, factor: scale(ps, 1.0) or ps[0].grad[:-1].mul_(factor))
    assert beyond.scaled(0, 1, 100) == {"wrong": beyond.COLUMNS}


def test_numbers_of_a_tile_depend_on_their_place_alone():
    wholes, parts = {}, run_ranks(4, _tiled)
    for name, shape in (("matrix", (2050, 12)), ("stack", (3, 1030, 8))):
        wholes[name] = torch.empty(shape)
        tile.fill_(wholes[name], name, 2.0, 1.0)
        for part in parts:
            values, slices = part[name]
            assert torch.equal(torch.tensor(values), wholes[name][tuple(slice(*pair) for pair in slices)])
    assert abs(float(wholes["matrix"].std()) - 2.0) < 0.1 and abs(float(wholes["matrix"].mean()) - 1.0) < 0.1


def _tiled(rank):
    from torch.distributed.tensor import Replicate, Shard

    mesh, _ = sums.mesh_of(rank, 4, {"tp": 2})
    found = {}
    for name, shape, placements in (
        ("matrix", (2050, 12), [Shard(0), Shard(1)]),
        ("stack", (3, 1030, 8), [Replicate(), Shard(1)]),
    ):
        tensor = sums.gradient(shape, placements, mesh, torch.float32).grad
        tile.fill_(tensor, name, 2.0, 1.0)
        slices = [(one.start, one.stop) for one in dtensor.local_slices(tensor)]
        found[name] = (dtensor.local_tensor(tensor).tolist(), slices)
    return found


def test_factors_stand_for_the_gradients_of_float64(monkeypatch, tmp_path):
    torch.manual_seed(0)
    kinds = (torch.nn.Embedding(50, 24), torch.nn.Linear(24, 40), torch.nn.Linear(40, 50, bias=False))
    model = torch.nn.Sequential(*kinds)
    ids = torch.randint(0, 50, (3, 5))

    def loss_of(model):
        nothing = model[1](torch.empty(0, 24, dtype=torch.float64)).sum()  # as of an expert without tokens
        return model(ids).float().square().sum() + nothing  # code that asks for float32 must not get it

    exact = copy.deepcopy(model).double()
    whole = exact(ids).square().sum()
    whole.backward()
    whole = whole.detach()
    monkeypatch.setattr(float64, "FACTORED_NUMEL", 900)
    found, gradients = float64.loss_and_gradients(model, loss_of)
    assert found == pytest.approx(float(whole), rel=1e-14)
    assert set(gradients.factors) == {"0.weight", "1.weight", "2.weight"} and set(gradients.whole) == {"1.bias"}
    float64.write(gradients, str(tmp_path / "gradients"))
    gradients = float64.read(str(tmp_path / "gradients"))
    for name, parameter in exact.named_parameters():
        if parameter.ndim == 2:
            rows = gradients.rows(name, 3, 20, slice(1, 9))
            assert torch.allclose(rows, parameter.grad[3:20, 1:9], rtol=1e-12, atol=1e-12)


def rows_of(*words, budget=1 << 31, meshes=("1", "dp_shard=2,tp=2")):
    loaded = config.load(None, list(words))
    checks = real.of_model(loaded, budget)
    return {(c.name, c.mesh): real.measured(c, budget) for c in checks if c.mesh in meshes}


@pytest.mark.parametrize(
    ("model", "mesh", "sizes"),
    [
        ("llama3", "dp_shard=2,tp=2", "ffn_dim = 128"),
        ("deepseek_v3", "1", "ffn_dim = 128"),
        ("gpt_oss", "1", "moe_ffn_dim = 64, sliding_window = 3"),
    ],
)
def test_a_step_of_one_layer_is_that_of_float64(model, mesh, sizes):
    sizes = f"{{dim = 64, vocab_size = 300, {sizes}}}"
    rows = rows_of("--model.name", model, "--model.overrides", sizes, meshes=(mesh,))
    assert {row.verdict for row in rows.values()} == {"pass"}, rows
    assert ("layer and vocabulary: gradients", mesh) in rows


def test_a_layer_that_computes_wrongly_is_seen(monkeypatch):
    from shardtrain.models.layers import FeedForward

    forward = FeedForward.forward
    # rounding to bfloat16 on the way: far within what a loss curve shows, far outside what float32 explains
    rounded = lambda self, x: forward(self, x.bfloat16().float() if x.dtype == torch.float32 else x)  # noqa: E731
    monkeypatch.setattr(FeedForward, "forward", rounded)
    rows = rows_of("--model.overrides", "{dim = 64, vocab_size = 300}", meshes=("1",))
    assert rows["layer and vocabulary: gradients", "1"].verdict == "fail"


def test_a_model_that_does_not_fit_is_cut_and_each_cut_is_said():
    def counted(piece):
        _, _, model = real_layers.build(piece.loaded.config, piece.cut_embedding)
        return real.replace(piece, numel=sum(p.numel() for p in model.parameters()))

    loaded = config.load(None, ["--model.name", "deepseek_v3", "--model.flavor", "671B"])
    found = {piece.name: piece for piece in real_layers.pieces(loaded, 8 << 30, counted)}
    assert set(found) == {"dense layer", "layer", "vocabulary"}
    assert all(piece.bytes_on({}, 1) <= 8 << 30 for piece in found.values())
    assert "experts 256 -> " in found["layer"].said and "vocabulary 129280 -> 1024" in found["layer"].said
    assert "embedding of 1024 rows" in found["vocabulary"].said
    (whole,) = real_layers.pieces(loaded, 1 << 50, counted)
    assert whole.said == "num_layers 61 -> 2"


def test_what_does_not_fit_is_left_out_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(real, "of_model", lambda *_: iter(()))
    monkeypatch.setattr(real, "general", lambda _: _one_that_fits_and_one_that_does_not())
    assert cli.main(["verify", "--real", "--memory", "1"]) == 0
    text = capsys.readouterr().out
    assert "left out" in text and "needs 2.00 GiB of memory, 1.00 GiB allowed" in text
    assert "1 passed, 0 failed, 1 left out: checks that were left out have no result" in text
    assert cli.main(["verify", "--real", "--json", "--memory=1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in told["rows"]] == ["pass", "left out"] and told["exit_code"] == 0


def _one_that_fits_and_one_that_does_not():
    for gib in (1, 2):
        yield real.Check("gradient norm", "", "1", 1, gib << 30, 1e-6, lambda _: (0.0, ""))


@pytest.mark.parametrize(("error", "verdict", "status"), [(1e-7, "pass", 0), (2e-6, "fail", 4), (math.nan, "fail", 4)])
def test_an_error_above_the_limit_fails_and_so_does_none_at_all(error, verdict, status):
    row = real.measured(real.Check("loss sum", "", "1", 1, 0, 1e-6, lambda _: (error, "")), 1)
    assert row.verdict == verdict and real.exit_code([row]) == status


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--real", "--mesh", "tp=2"], "--mesh has no effect with --real"),
        (["--real", "--full"], "--full has no effect with --real"),
        (["--memory", "8"], "--memory has no effect without --real"),
        (["--real", "--memory", "much"], "must be a number of GiB above 0"),
        (["--real", "--memory", "0"], "must be a number of GiB above 0"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, named):
    with pytest.raises(ConfigError, match=named):
        verify_request.read(words)


CHECKS = list(real.general(SMALL))
MEMORY = int(float(os.environ.get("SHARDTRAIN_REAL_GIB", "2")) * 2**30)
"""What a check at real size may take here, where several tests run at once; those that need more skip, and say so.
``SHARDTRAIN_REAL_GIB=17`` runs those beyond 2^31 numbers too, as ``shardtrain verify --real`` does by itself."""


@pytest.mark.parametrize("check", cases(CHECKS[:3], nightly=CHECKS[3:]), ids=lambda c: f"{c.name}-{c.size}-{c.mesh}")
def test_each_general_check_passes_small(check):
    assert real.measured(check, 1 << 32).verdict == "pass"


@pytest.mark.parametrize("check", list(real.general(real.Sizes())), ids=lambda c: f"{c.name}-{c.size}-{c.mesh}")
@pytest.mark.nightly("minutes each, and all the memory there is; test_each_general_check_passes_small states it")
def test_each_general_check_passes_at_real_size_or_does_not_fit(check):
    row = real.measured(check, MEMORY)
    if row.verdict == "left out":
        pytest.skip(row.note)
    assert row.verdict == "pass", row


@pytest.mark.parametrize(("model", "flavor"), PRESETS)
@pytest.mark.nightly("minutes each, and gigabytes; the checks themselves are stated small")
@pytest.mark.timeout(1800)
def test_one_layer_of_each_family_is_that_of_float64(model, flavor):
    rows = rows_of("--model.name", model, "--model.flavor", flavor, budget=MEMORY, meshes=("1", "tp=2"))
    steps = [row for row in rows.values() if row.check.endswith((": loss", ": norm", ": gradients"))]
    if not any(row.verdict != "left out" for row in steps):
        pytest.skip("; ".join({row.note for row in steps}))
    assert not [row for row in rows.values() if row.verdict == "fail"]


def test_the_spare_folder_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    count = lambda folder: (float(len(set(folder.iterdir()) - {folder / temporary.MARK})), "")  # noqa: E731
    assert real.measured(real.Check("loss sum", "", "1", 1, 0, 1e-6, count), 1).verdict == "pass"
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        # a head that is most of its model, and a layer that is
        (["qwen2", "0.5B"], "vocabulary"),
        (["llama2", "1B"], "layer"),
    ],
)
@pytest.mark.nightly("a gigabyte, and a minute each")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
def test_a_step_takes_no_more_memory_than_its_row_says_it_needs(words, name, tmp_path):
    loaded = config.load("debug", [f"--model.name={words[0]}", f"--model.flavor={words[1]}"])

    def count(piece):
        (found,) = real._on_ranks(tmp_path, 1, real_layers.count, piece.loaded.config, piece.cut_embedding, alone=True)
        return dataclasses.replace(piece, numel=found[0], largest_unit=found[1], widest=found[2])

    (piece,) = [one for one in real_layers.pieces(loaded, 1 << 29, count) if one.name == name]
    path = str(tmp_path / "gradients.safetensors")
    before, reference, step = (
        run_ranks(1, _peak, *call)[0]
        for call in (
            (None,),
            (real_layers.reference, piece, path),
            (real_layers.step, trainer, real_layers.on_mesh(piece, {}).config, piece, path),
        )
    )
    assert piece.numel > 1 << 26 or name == "layer"
    assert max(reference, step) - before <= piece.bytes_on({}, 1), (before, reference, step)


def _peak(rank, function, *arguments):
    """Most bytes that this process has held since now."""
    Path("/proc/self/clear_refs").write_text("5")
    if function:
        function(rank, 1, *arguments)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

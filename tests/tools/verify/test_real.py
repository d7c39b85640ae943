"""Checks at real size: sums, far ends of tensors and wide layers compared with float64, and detection of faults."""

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
from hf_architectures import ARCHITECTURES, hf_config, layered
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

SMALL = real.Sizes(
    numbers=1 << 20,
    far_rows=4099,
    far_samples=10_007,
    vocabularies=(1000,),
    tokens=256,
    losses=1 << 18,
)
PRESETS = (
    ("llama3", "8B"),
    ("llama3", "70B"),
    ("qwen3", "8B"),
    ("qwen3_moe", "30B-A3B"),
    ("qwen3_next", "80B-A3B"),
    ("mistral", "7B-v0.3"),
    ("mixtral", "8x7B"),
    ("deepseek_v3", "671B"),
    ("llama4", "17bx128e"),
    ("gpt_oss", "20b"),
    ("neox", "pythia-6.9b"),
    ("encoder", "base"),
)
"""One flavor of each family, at its training width."""


def norm(ranks, degrees, numbers, values):
    return sums.norm_error(run_ranks(ranks, _norm, ranks, degrees, numbers // 4096, values))


def _norm(rank, ranks, degrees, rows, values):
    return sums.gradient_norm(rank, ranks, degrees, rows, 4096, values, "float32")


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(1, {}), (2, {}), (2, {"dp_replicate": 2}), (4, {"tp": 2})]
)
def test_the_norm_of_five_million_numbers_matches_float64_on_every_mesh(ranks, degrees):
    assert norm(ranks, degrees, 5_000_000, "normal") <= real.SUM_LIMIT


@pytest.mark.parametrize("values", ["offset", "tiny", "one large"])
def test_the_norm_matches_float64_for_difficult_values(values):
    assert norm(1, {}, 1_000_000, values) <= real.SUM_LIMIT


def test_a_norm_summed_in_float32_is_detected(monkeypatch):
    # A previous version: sequential float32 sums of squares per lane, off by 1.3e-4 at five million numbers.
    def chained(tensors):
        norms = torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
        return torch.stack(norms).square().sum()

    monkeypatch.setattr(grad_clip, "squared_norm", chained)

    assert norm(1, {}, 5_000_000, "normal") > real.SUM_LIMIT


@pytest.mark.parametrize(("ranks", "degrees"), [(1, {}), (2, {"tp": 2}), (4, {"tp": 2})])
@pytest.mark.parametrize(("vocabulary", "tokens", "batches"), [(128_256, 32, 8), (2, 1 << 18, 256)])
def test_a_loss_over_a_real_vocabulary_or_many_tokens_matches_float64(
    ranks, degrees, vocabulary, tokens, batches
):
    losses = run_ranks(ranks, sums.loss_sum, ranks, degrees, vocabulary, tokens, batches)
    assert sums.loss_error(losses) <= real.SUM_LIMIT


def test_micro_batches_summed_in_float32_are_detected(monkeypatch):
    # Each addition rounds a float32 total by up to 6e-8 of its value, and equal sums round in the same direction.
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


def test_chunks_of_tokens_are_summed_in_float64(monkeypatch):
    # A million tokens with a real vocabulary have eight thousand chunks.
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", 4)
    logits = torch.zeros(1, 1 << 12, 4)
    targets = torch.zeros(1, 1 << 12, dtype=torch.int64)
    exact = (1 << 12) * math.log(4.0)
    assert abs(float(cross_entropy.cross_entropy_sum(logits, targets)) / exact - 1) < 2e-7


def test_the_end_of_a_tensor_beyond_2_31_is_drawn_ordered_and_read_correctly(tmp_path):
    assert beyond.drawn(0, 1, beyond.ROWS) == {"wrong": 0}
    assert beyond.ordered(0, 1, (1 << 33) + 7) == {"wrong": 0}
    assert beyond.stored_far(0, 1, beyond.ROWS, str(tmp_path)) == {"wrong": 0}


def test_a_partially_scaled_gradient_is_detected(monkeypatch):
    assert beyond.scaled(0, 1, 100) == {"wrong": 0}
    scale = grad_clip.scale_gradients
    monkeypatch.setattr(
        grad_clip,
        "scale_gradients",
        lambda ps, factor: scale(ps, 1.0) or ps[0].grad[:-1].mul_(factor),
    )

    assert beyond.scaled(0, 1, 100) == {"wrong": beyond.COLUMNS}


def test_numbers_of_a_tile_depend_only_on_their_position():
    matrix = torch.empty(2050, 12)
    stack = torch.empty(3, 1030, 8)
    tile.fill_(matrix, "matrix", 2.0, 1.0)
    tile.fill_(stack, "stack", 2.0, 1.0)
    for parts_of_rank in run_ranks(4, _tiled):
        for name, full in (("matrix", matrix), ("stack", stack)):
            values, bounds = parts_of_rank[name]
            slices = tuple(slice(*pair) for pair in bounds)
            assert torch.equal(torch.tensor(values), full[slices])

    # A standard deviation of 2 and a mean of 1; the tile repeats, so sample errors are larger.
    assert abs(float(matrix.std()) - 2.0) < 0.1
    assert abs(float(matrix.mean()) - 1.0) < 0.1


def _tiled(rank):
    from torch.distributed.tensor import Replicate, Shard

    mesh, _ = sums.mesh_of(rank, 4, {"tp": 2})
    tensors = {}
    for name, shape, placements in (
        ("matrix", (2050, 12), [Shard(0), Shard(1)]),
        ("stack", (3, 1030, 8), [Replicate(), Shard(1)]),
    ):
        tensor = sums.gradient(shape, placements, mesh, torch.float32).grad
        tile.fill_(tensor, name, 2.0, 1.0)
        slices = [(part.start, part.stop) for part in dtensor.local_slices(tensor)]
        tensors[name] = (dtensor.local_tensor(tensor).tolist(), slices)
    return tensors


def test_factors_reproduce_the_gradients_of_float64(monkeypatch, tmp_path):
    torch.manual_seed(0)
    kinds = (
        torch.nn.Embedding(50, 24),
        torch.nn.Linear(24, 40),
        torch.nn.Linear(40, 50, bias=False),
    )
    model = torch.nn.Sequential(*kinds)
    ids = torch.randint(0, 50, (3, 5))

    def loss_of(model):
        nothing = model[1](
            torch.empty(0, 24, dtype=torch.float64)
        ).sum()  # like an expert without tokens
        return model(ids).float().square().sum() + nothing  # .float() must have no effect

    exact = copy.deepcopy(model).double()
    expected = exact(ids).square().sum()
    expected.backward()
    expected = expected.detach()
    monkeypatch.setattr(float64, "FACTORED_NUMEL", 900)
    loss, gradients = float64.loss_and_gradients(model, loss_of)

    assert loss == pytest.approx(float(expected), rel=1e-14)
    assert set(gradients.factors) == {"0.weight", "1.weight", "2.weight"}
    assert set(gradients.whole) == {"1.bias"}

    float64.write(gradients, str(tmp_path / "gradients"))
    gradients = float64.read(str(tmp_path / "gradients"))
    for name, parameter in exact.named_parameters():
        if parameter.ndim == 2:
            rows = gradients.rows(name, 3, 20, slice(1, 9))
            assert torch.allclose(rows, parameter.grad[3:20, 1:9], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [0, 3])
def test_factors_of_a_product_with_an_untransposed_matrix_match_float64(monkeypatch, first):
    """Experts of gpt-oss compute ``x @ weight[expert]``."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(4, 24, 40))
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)

    def loss_of(model):
        return (x @ model.weight[first]).square().sum()

    exact = copy.deepcopy(model).double()
    loss_of(exact).backward()
    monkeypatch.setattr(float64, "FACTORED_NUMEL", 900)
    _, gradients = float64.loss_and_gradients(model, loss_of)

    assert set(gradients.factors) == {"weight"}

    expected = exact.weight.grad.reshape(-1, 40)
    rows = gradients.rows("weight", 10, 96, slice(1, 30))
    assert torch.allclose(rows, expected[10:96, 1:30], rtol=1e-12, atol=1e-12)


def rows_of(*arguments, budget=1 << 31, meshes=("1", "dp_shard=2,tp=2")):
    loaded = config.load(None, list(arguments))
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
def test_a_step_of_one_layer_matches_float64(model, mesh, sizes):
    sizes = f"{{dim = 64, vocab_size = 300, {sizes}}}"
    rows = rows_of("--model.name", model, "--model.overrides", sizes, meshes=(mesh,))
    assert {row.verdict for row in rows.values()} == {"pass"}, rows
    assert ("layer and vocabulary: gradients", mesh) in rows


@pytest.mark.parametrize(
    "name", cases(["deepseek_v3"], nightly=["qwen3", "granitemoe", "gpt_oss", "lfm2"])
)
def test_a_step_of_each_kind_of_layer_of_a_transformers_network_matches_float64(name, tmp_path):
    """The first layer of each kind is kept, for example one dense layer and one with experts."""
    pytest.importorskip("transformers")
    hf_config(name, **layered(name, 4)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["architectures"] = [ARCHITECTURES[name][0]]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arguments = ("--model.name", "transformers", "--model.overrides.path", str(tmp_path))
    rows = rows_of(*arguments, meshes=("1", "dp_shard=2,tp=2"))
    steps = {name: row for name, row in rows.items() if name[0].startswith("layers")}

    assert len(steps) == 6
    assert {row.verdict for row in steps.values()} == {"pass"}, steps

    # Two of these networks have only one kind of layer.
    kinds_of_layers = 1 if name in ("qwen3", "granitemoe") else 2
    assert steps["layers: loss", "1"].note.endswith(f" 4 -> {kinds_of_layers}")


def network_pieces(name, folder, budget, changes):
    """Return the pieces of a small network by name, counted in this process."""
    pytest.importorskip("transformers")
    hf_config(name, **layered(name, 4)).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": [ARCHITECTURES[name][0]], **changes}
    (folder / "config.json").write_text(json.dumps(fields))
    loaded = config.load(
        None, ["--model.name", "transformers", "--model.overrides.path", str(folder)]
    )

    def counted(piece):
        numel, unit, widest = real_layers.count(0, 1, piece.loaded.config, piece.cut_embedding)
        return dataclasses.replace(piece, numel=numel, largest_unit=unit, widest=widest)

    pieces_folder = folder / "pieces"
    pieces_folder.mkdir()
    pieces = real_layers.network_pieces(loaded, pieces_folder, budget, counted)
    return {piece.name: piece for piece in pieces}


def fields_of(piece):
    folder = Path(piece.loaded.config.model.overrides["path"])
    return json.loads((folder / "config.json").read_text())


def test_a_network_that_does_not_fit_has_fewer_experts_and_a_small_vocabulary(tmp_path):
    """A budget of 0 requires the smallest pieces: as many experts as a token uses, in one group."""
    changes = {
        "n_routed_experts": 8,
        "vocab_size": 4000,
        "pad_token_id": 3999,
        "bos_token_id": 7,
        "eos_token_id": [8, 3998],
    }
    pieces = network_pieces("deepseek_v3", tmp_path, 0, changes)
    layers = pieces["layers"]

    assert layers.size_text == (
        "num_hidden_layers 4 -> 2, vocabulary 4000 -> 1024, n_routed_experts 8 -> 2, one group"
    )

    fields = fields_of(layers)
    assert fields["n_routed_experts"] == 2
    assert fields["n_group"] == 1
    assert fields["topk_group"] == 1
    assert fields["vocab_size"] == 1024
    # Of the special tokens, only those within the smaller vocabulary remain.
    assert fields["pad_token_id"] is None
    assert fields["bos_token_id"] == 7
    assert fields["eos_token_id"] is None

    # The piece of the vocabulary has a full head and a part of the embedding.
    vocabulary = pieces["vocabulary"]
    assert fields_of(vocabulary)["vocab_size"] == 4000
    _, _, model = real_layers.build(vocabulary.loaded.config, vocabulary.cut_embedding)
    assert model.embedding.num_embeddings == 1024
    assert model.head.out_features == 4000


def test_experts_are_halved_only_until_the_network_fits(tmp_path):
    changes = {"num_local_experts": 64, "vocab_size": 300}
    unlimited = network_pieces("mixtral", tmp_path / "unlimited", 1 << 40, changes)
    assert set(unlimited) == {"layers"}

    budget = unlimited["layers"].bytes_on({}, 1) - 1
    pieces = network_pieces("mixtral", tmp_path / "cut", budget, changes)
    assert fields_of(pieces["layers"])["num_local_experts"] == 32
    assert pieces["layers"].bytes_on({}, 1) <= budget


def test_the_weights_of_a_network_may_be_quantized(tmp_path):
    """No weights are read, so the network is built without its quantization."""
    changes = {"quantization_config": {"quant_method": "mxfp4"}}
    pieces = network_pieces("gpt_oss", tmp_path, 1 << 40, changes)
    assert "quantization_config" not in fields_of(pieces["layers"])
    assert pieces["layers"].numel > 0


def test_layers_of_a_kind_that_the_config_computes_are_kept(tmp_path):
    """config.json of Qwen3-Next has an interval instead of a list of layers."""
    changes = {"full_attention_interval": 2, "layer_types": None}
    pieces = network_pieces("qwen3_next", tmp_path, 1 << 40, changes)
    fields = fields_of(pieces["layers"])
    assert fields["layer_types"] == ["linear_attention", "full_attention"]
    assert fields["num_hidden_layers"] == 2


def test_a_wrong_layer_is_detected(monkeypatch):
    from shardtrain.models.layers import FeedForward

    forward = FeedForward.forward

    def rounded(self, x):
        # Intermediate rounding to bfloat16 is invisible in a loss curve, but much larger than float32 errors.
        return forward(self, x.bfloat16().float() if x.dtype == torch.float32 else x)

    monkeypatch.setattr(FeedForward, "forward", rounded)
    rows = rows_of("--model.overrides", "{dim = 64, vocab_size = 300}", meshes=("1",))

    assert rows["layer and vocabulary: gradients", "1"].verdict == "fail"


def test_a_model_that_does_not_fit_is_reduced_and_each_reduction_reported():
    def counted(piece):
        _, _, model = real_layers.build(piece.loaded.config, piece.cut_embedding)
        return real.replace(piece, numel=sum(p.numel() for p in model.parameters()))

    loaded = config.load(None, ["--model.name", "deepseek_v3", "--model.flavor", "671B"])
    pieces = {piece.name: piece for piece in real_layers.pieces(loaded, 8 << 30, counted)}

    assert set(pieces) == {"dense layer", "layer", "vocabulary"}
    assert all(piece.bytes_on({}, 1) <= 8 << 30 for piece in pieces.values())
    assert "experts 256 -> " in pieces["layer"].size_text
    assert "vocabulary 129280 -> 1024" in pieces["layer"].size_text
    assert "embedding of 1024 rows" in pieces["vocabulary"].size_text

    (full_model,) = real_layers.pieces(loaded, 1 << 50, counted)
    assert full_model.size_text == "num_layers 61 -> 2"


def test_checks_that_do_not_fit_are_skipped_and_reported(capsys, monkeypatch):
    monkeypatch.setattr(real, "of_model", lambda *_: iter(()))
    monkeypatch.setattr(real, "general", lambda _: _one_that_fits_and_one_that_does_not())
    assert cli.main(["verify", "--real", "--memory", "1"]) == 0

    text = capsys.readouterr().out
    assert "left out" in text
    assert "needs 2.00 GiB of memory, 1.00 GiB allowed" in text
    assert "1 passed, 0 failed, 1 left out: checks that were left out have no result" in text
    assert cli.main(["verify", "--real", "--json", "--memory=1"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in report["rows"]] == ["pass", "left out"]
    assert report["exit_code"] == 0


def _one_that_fits_and_one_that_does_not():
    for gib in (1, 2):
        yield real.Check("gradient norm", "", "1", 1, gib << 30, 1e-6, lambda _: (0.0, ""))


@pytest.mark.parametrize(
    ("error", "verdict", "status"), [(1e-7, "pass", 0), (2e-6, "fail", 4), (math.nan, "fail", 4)]
)
def test_an_error_above_the_limit_or_nan_fails(error, verdict, status):
    row = real.measured(real.Check("loss sum", "", "1", 1, 0, 1e-6, lambda _: (error, "")), 1)
    assert row.verdict == verdict
    assert real.exit_code([row]) == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--real", "--mesh", "tp=2"], "--mesh has no effect with --real"),
        (["--real", "--full"], "--full has no effect with --real"),
        (["--memory", "8"], "--memory has no effect without --real"),
        (["--real", "--memory", "much"], "must be a number of GiB above 0"),
        (["--real", "--memory", "0"], "must be a number of GiB above 0"),
    ],
)
def test_conflicting_verify_arguments_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        verify_request.read(arguments)


CHECKS = list(real.general(SMALL))
MEMORY = int(float(os.environ.get("SHARDTRAIN_REAL_GIB", "2")) * 2**30)
"""Memory limit of a check at real size, because several tests run concurrently. Checks that need more are skipped.
``SHARDTRAIN_REAL_GIB=17`` also runs those beyond 2^31 numbers, which ``shardtrain verify --real`` runs by default."""


@pytest.mark.parametrize(
    "check", cases(CHECKS[:3], nightly=CHECKS[3:]), ids=lambda c: f"{c.name}-{c.size}-{c.mesh}"
)
def test_each_general_check_passes_small(check):
    assert real.measured(check, 1 << 32).verdict == "pass"


@pytest.mark.parametrize(
    "check", list(real.general(real.Sizes())), ids=lambda c: f"{c.name}-{c.size}-{c.mesh}"
)
@pytest.mark.nightly(
    "minutes each, and all available memory; test_each_general_check_passes_small covers it"
)
def test_each_general_check_passes_at_real_size_or_does_not_fit(check):
    row = real.measured(check, MEMORY)
    if row.verdict == "left out":
        pytest.skip(row.note)
    assert row.verdict == "pass", row


@pytest.mark.parametrize(("model", "flavor"), PRESETS)
@pytest.mark.nightly("minutes each, and gigabytes; the checks have small versions")
@pytest.mark.timeout(1800)
def test_one_layer_of_each_family_matches_float64(model, flavor):
    rows = rows_of(
        "--model.name", model, "--model.flavor", flavor, budget=MEMORY, meshes=("1", "tp=2")
    )
    steps = [
        row for row in rows.values() if row.check.endswith((": loss", ": norm", ": gradients"))
    ]
    if not any(row.verdict != "left out" for row in steps):
        pytest.skip("; ".join({row.note for row in steps}))

    assert not [row for row in rows.values() if row.verdict == "fail"]


def test_the_spare_folder_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    count = lambda folder: (float(len(set(folder.iterdir()) - {folder / temporary.MARK})), "")  # noqa: E731
    assert real.measured(real.Check("loss sum", "", "1", 1, 0, 1e-6, count), 1).verdict == "pass"
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        # a model dominated by its head, and one dominated by a layer
        (["qwen2", "0.5B"], "vocabulary"),
        (["llama2", "1B"], "layer"),
    ],
)
@pytest.mark.nightly("a gigabyte, and a minute each")
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc"
)
def test_a_step_needs_no_more_memory_than_its_row_states(arguments, name, tmp_path):
    family, flavor = arguments
    loaded = config.load("debug", [f"--model.name={family}", f"--model.flavor={flavor}"])

    def count(piece):
        counted = (real_layers.count, piece.loaded.config, piece.cut_embedding)
        ((numel, largest_unit, widest),) = real._on_ranks(tmp_path, 1, *counted, alone=True)
        return dataclasses.replace(piece, numel=numel, largest_unit=largest_unit, widest=widest)

    (piece,) = [piece for piece in real_layers.pieces(loaded, 1 << 29, count) if piece.name == name]
    assert piece.numel > 1 << 26 or name == "layer"

    # Peak memory of three processes: an idle one, the float64 reference, and a step.
    path = str(tmp_path / "gradients.safetensors")
    step_config = real_layers.on_mesh(piece, {}).config
    (idle_bytes,) = run_ranks(1, _peak, None)
    (reference_bytes,) = run_ranks(1, _peak, real_layers.reference, piece, path)
    (step_bytes,) = run_ranks(1, _peak, real_layers.step, trainer, step_config, piece, path)
    used_bytes = max(reference_bytes, step_bytes) - idle_bytes
    assert used_bytes <= piece.bytes_on({}, 1), (idle_bytes, reference_bytes, step_bytes)


def _peak(rank, function, *arguments):
    """Return the peak memory in bytes of this process during the call."""
    Path("/proc/self/clear_refs").write_text("5")
    if function:
        function(rank, 1, *arguments)
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return 1024 * int(line.split()[1])

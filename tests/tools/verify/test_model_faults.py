"""Verify detects faults planted in a sound model file, and reports the right verdict and cause.

``FAULTS`` is a table: changes of the file, the mesh, the verdict, and texts that the cause must contain. "refused" is a
verdict before any mesh is run. The other verdicts are those of the mesh.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from model_files import ask
from once import made_once
from tiers import cases, chosen

from shardtrain.tools import verify
from shardtrain.utils.errors import ConfigError

DROPPED = "dropout: switched off (dropout with p=0.1), because each mesh drops different elements"
BY_DEFAULT = (
    "a call counter",
    "a norm on the sequence declared replicated",
    "a core with a bias by distance",
)
"""Faults tested with the full command by default. The others are tested without it, in one launch."""
SOUND = (Path(__file__).parent / "sound_model.py").read_text()


class Fault(NamedTuple):
    """Text replaced in the sound model, the mesh, the verdict of verify, and parts of the cause."""

    changes: list[tuple[str, str]]
    mesh: str
    verdict: str
    cause: list[str]
    needs_mesh: bool = False


IN_FFN = "return self.down(F.gelu(self.up(x)))"
IN_ATTN = "        q, k, v = (w(x)"
IN_BLOCK = "        x = x + self.drop(self.attn("
EMBEDDED = "x = self.embed(tokens)\n"
UNFLATTEN = "unflatten(-1, (-1, self.head_dim))"
EMBED_INIT = "self.embed = nn.Embedding(c.vocab_size, c.dim)"
FFN_INIT = "self.up, self.down = nn.Linear(c.dim, 2 * c.dim), nn.Linear(2 * c.dim, c.dim)"
CORE = "return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)"
HEAD_INIT = "        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)\n"
DRAW = '"*.weight": Draw("normal", std=0.02)'


SEED = "sets the seed of a global random generator in forward"


def cached(*lines: str) -> list[tuple[str, str]]:
    """Return changes for a core that computes its mask m for n tokens with the lines. ``kept`` is a class attribute."""
    body = "\n        ".join(
        ["n = q.size(2)", *lines, CORE.replace("is_causal=True", "attn_mask=m")]
    )
    mask = "def mask(n):\n    return torch.ones(n, n, dtype=torch.bool).tril()\n\n\n"
    return [
        ("class Core(nn.Module):\n", f"{mask}class Core(nn.Module):\n    kept = None\n\n"),
        (CORE, body),
    ]


def before_ffn(*lines: str) -> list[tuple[str, str]]:
    return [(IN_FFN, "\n        ".join([*lines, IN_FFN]))]


FAULTS: dict[str, Fault] = {
    # initial weights that depend on the rank or the number of ranks
    "initial weights by rank": Fault(
        [(DRAW, DRAW.replace("0.02", "0.02 * (1 + int(os.environ.get('RANK', 0)))"))],
        "dp_shard=2", "refused", ["starts from other weights on rank 1 of 2", "for *.weight"],
    ),
    "initial weights by number of ranks": Fault(
        [(DRAW, DRAW.replace("0.02", "0.02 / int(os.environ.get('WORLD_SIZE', 1))"))],
        "dp_shard=2", "refused", ["starts from other weights on rank 0 of 2"],
    ),
    # outputs that change between calls
    "dropout by hand": Fault(
        before_ffn("x = x * (torch.rand_like(x) > 0.1)"),
        "dp_shard=2", "refused", ["draws random numbers in module blocks.0.ffn (FeedForward)", "nn.Dropout"],
    ),
    "noise on the embedding": Fault(
        [(EMBEDDED, EMBEDDED + "        x = x + 0.1 * torch.randn_like(x)\n")],
        "dp_shard=2", "refused", ["draws random numbers in the model's own forward"],
    ),
    "a call counter": Fault(
        [(FFN_INIT, FFN_INIT + "\n        self.calls = 0"), *before_ffn("self.calls += 1", "x = x / self.calls")],
        "dp_shard=2", "refused", ["called twice", "module blocks.0.ffn (FeedForward) keeps state", "calls changes"],
    ),
    "a running mean": Fault(
        [
            (FFN_INIT, FFN_INIT + "\n        self.register_buffer('mean', torch.zeros(c.dim))"),
            ('    context="', '    buffers=("blocks.*.ffn.mean",),\n    context="'),
            *before_ffn("self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))", "x = x - self.mean"),
        ],
        "dp_shard=2", "refused", ["module blocks.0.ffn (FeedForward) keeps state", "mean changes"],
    ),
    "a running mean for evaluation": Fault(
        [
            (FFN_INIT, FFN_INIT + "\n        self.register_buffer('mean', torch.zeros(c.dim))"),
            ('    context="', '    buffers=("blocks.*.ffn.mean",),\n    context="'),
            *before_ffn("self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))"),
        ],
        "dp_shard=2", "refused", ["changes the buffer blocks.0.ffn.mean in forward", "running statistics"],
    ),
    "a cache of the first call": Fault(
        [
            (FFN_INIT, FFN_INIT + "\n        self.kept = None"),
            *before_ffn("self.kept = x.detach().mean() if self.kept is None else self.kept * 0.9", "x = x - self.kept"),
        ],
        "dp_shard=2", "refused", ["module blocks.0.ffn (FeedForward) keeps state", "kept changes"],
    ),
    "a counter of all calls": Fault(
        [
            ("class FeedForward(", "CALLS = [0]\n\n\nclass FeedForward("),
            *before_ffn("CALLS[0] += 1", "x = x * (1 + CALLS[0] % 3)"),
        ],
        "dp_shard=2", "refused", ["when called twice", "(FeedForward) keeps state", "(CALLS changes)"],
    ),
    "numbers of a clock": Fault(
        [("import os\n", "import os\nimport time\n"), *before_ffn("x = x * (1 + time.perf_counter() % 1)")],
        "dp_shard=2", "refused",
        ["when called twice with the same tokens, first in module blocks.0.ffn (FeedForward); compute only from"],
    ),
    "a random number of Python": Fault(
        [("import os\n", "import os\nimport random\n"), *before_ffn("x = x * (1 + random.random())")],
        "dp_shard=2", "refused", ["draws random numbers in module blocks.0.ffn (FeedForward)"],
    ),
    "a random number of NumPy": Fault(
        [("import os\n", "import os\nimport numpy\n"), *before_ffn("x = x * (1 + float(numpy.random.rand()))")],
        "dp_shard=2", "refused", ["draws random numbers in module blocks.0.ffn (FeedForward)"],
    ),
    # seeds
    "a seed before dropout": Fault(
        [(IN_BLOCK, "        torch.manual_seed(0)\n" + IN_BLOCK)],
        "dp_shard=2", "refused",
        [SEED, "before a draw in module blocks.0.drop (Dropout)", "training sets debug.seed once"],
    ),
    "a seed before dropout that is restored": Fault(
        [(IN_BLOCK, "        with torch.random.fork_rng():\n            torch.manual_seed(0)\n"
          "            x = self.drop(x)\n" + IN_BLOCK)],
        "dp_shard=2", "refused", [SEED, "before a draw in module blocks.0.drop (Dropout)"],
    ),
    "a seed before noise": Fault(
        before_ffn("torch.manual_seed(0)", "x = x + 0.1 * torch.rand_like(x)"),
        "dp_shard=2", "refused", [SEED, "before a draw in module blocks.0.ffn (FeedForward)"],
    ),
    "a seed of Python": Fault(
        [("import os\n", "import os\nimport random\n"), *before_ffn("random.seed(0)")],
        "dp_shard=2", "refused", [SEED],
    ),
    "noise of a separate generator": Fault(
        before_ffn("x = x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))"),
        "dp_shard=2", "refused", ["module blocks.0.ffn (FeedForward) draws random numbers that depend on the number"],
    ),
    # rows of several lengths
    "a mask of the first length": Fault(
        cached("if Core.kept is None:", "    Core.kept = mask(n)", "m = Core.kept[:n, :n]"),
        "dp_shard=2", "refused",
        ["returns different outputs for 3 rows of 28 tokens after 1 row of 14", "keeps Core.kept", "fails"],
    ),
    "a window of the first length": Fault(
        cached("if Core.kept is None:", "    Core.kept = n // 2", "m = mask(n).triu(1 - Core.kept)"),
        "dp_shard=2", "refused", ["keeps Core.kept, and differs in module blocks.0.attn.core (Core)"],
    ),
    "a batch size in a scale": Fault(
        before_ffn("x = x / x.size(0)"),
        "dp_shard=2", "refused", ["module blocks.0.ffn (FeedForward) depends on the number of rows"],
    ),
    "layers counted on the class": Fault(
        [
            ("class FeedForward(nn.Module):\n", "class FeedForward(nn.Module):\n    built = 0\n\n"),
            (FFN_INIT, FFN_INIT + "\n        FeedForward.built += 1\n        self.scale = 1.0 / FeedForward.built"),
            *before_ffn("x = x * self.scale"),
        ],
        "pp=2", "refused", ["when it is built a second time", "module blocks.0.ffn (FeedForward)"],
    ),
    # rows that depend on each other
    "batch norm": Fault(
        [
            ("self.ffn_norm, self.ffn = nn.LayerNorm(c.dim)", "self.ffn_norm, self.ffn = BatchNorm(c.dim)"),
            ("class Block(", "class BatchNorm(nn.LayerNorm):\n    def forward(self, x):\n"
             "        x = (x - x.mean((0, 1))) / x.std((0, 1))\n        return x * self.weight + self.bias\n"
             "\n\nclass Block("),
        ],
        "dp_shard=2", "refused", ["module blocks.0.ffn_norm (BatchNorm) mixes rows", "normalize each token separately"],
    ),
    "a mean over the batch": Fault(
        before_ffn("x = x - x.mean(0, keepdim=True)"),
        "dp_shard=2", "refused", ["module blocks.0.ffn (FeedForward) mixes rows"],
    ),
    "tokens beyond a capacity dropped": Fault(
        before_ffn(
            "chosen = (x[..., 0] > 0).flatten().long()",
            "place = torch.where(chosen == 1, chosen.cumsum(0), (1 - chosen).cumsum(0))",
            "x = x * (place <= chosen.numel() // 2).view(*x.shape[:2], 1)",
        ),
        "dp_shard=2", "refused", ["module blocks.0.ffn (FeedForward) mixes rows"],
    ),
    # tokens that depend on each other
    "a token sees the next": Fault(
        before_ffn("x = x + F.pad(x, (0, 0, 0, 1))[:, 1:]"),
        "dp_shard=2", "refused", ["lets a token see later tokens in module blocks.0.ffn (FeedForward)"],
    ),
    "a mean over the sequence": Fault(
        before_ffn("x = x - x.mean(1, keepdim=True)"),
        "cp=2", "refused", ["lets a token see later tokens in module blocks.0.ffn (FeedForward)"],
    ),
    "a running sum over the sequence": Fault(
        before_ffn("x = x + x.cumsum(1) / 10"),
        "cp=2", "not possible", ["mixes the tokens of a sequence outside of the attention core", "blocks.0.ffn (Feed"],
    ),
    "a token shift in the layer under cp": Fault(
        [(IN_BLOCK, "        x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]\n" + IN_BLOCK)],
        "cp=2", "not possible", ["outside of the attention core, in module blocks.0 (Block)"],
    ),
    "a token shift in the layer under tp": Fault(
        [(IN_BLOCK, "        x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]\n" + IN_BLOCK)],
        "tp=2", "not possible", ["in module blocks.0 (Block), where activations are split along the sequence"],
    ),
    "a token shift inside attention": Fault(
        [(IN_ATTN, "        x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]\n" + IN_ATTN)],
        "cp=2", "not possible", ["outside of the attention core, in module blocks.0.attn (Attention)"],
    ),
    "attention without a mask": Fault(
        [(CORE, CORE.replace(", is_causal=True", ""))],
        "cp=2", "not possible", ["is not causal", "module blocks.0.attn.core (Core) sees later tokens"],
    ),
    # dependence on ranks
    "a scale by the rank": Fault(
        before_ffn("x = x * (1 + int(os.environ.get('RANK', 0)))"),
        "dp_shard=2", "refused", ["on rank 1 of 2", "first in module blocks.0.ffn (FeedForward)"],
    ),
    "a scale by the number of ranks": Fault(
        before_ffn("x = x / (dist.get_world_size() if dist.is_initialized() else 1)"),
        "dp_shard=2", "refused", ["on rank 0 of 2", "first in module blocks.0.ffn (FeedForward)"],
    ),
    "an all-reduce in the model": Fault(
        before_ffn("y = x.detach().clone()", "if dist.is_initialized():", "    dist.all_reduce(y)", "x = x + y"),
        "dp_shard=2", "refused", ["of 2 than on one process", "first in module blocks.0.ffn (FeedForward)"],
    ),
    "more layers on more ranks": Fault(
        [("range(c.num_layers)", "range(c.num_layers + int(os.environ.get('RANK', 0)))")],
        "dp_shard=2", "refused", ["has other weights on rank 1 of 2", "blocks.2."],
    ),
    # dtypes and in-place writes
    "bfloat16 inside": Fault(
        [(IN_FFN, IN_FFN.replace("F.gelu(self.up(x))", "F.gelu(self.up(x).bfloat16()).float()"))],
        "tp=2", "refused", ["computes in bfloat16 in module blocks.0.ffn (FeedForward)"],
    ),
    "a float64 constant": Fault(
        before_ffn("x = x * torch.full((1,), 0.5, dtype=torch.float64)"),
        "dp_shard=2", "refused", ["fails in blocks.0.ffn.up", "Double"],
    ),
    "written in place": Fault(
        [(IN_BLOCK, IN_BLOCK.replace("x = x + ", "x += "))],
        "dp_shard=2", "refused", ["writes into its input in module blocks.0 (Block)"],
    ),
    # shapes, positions, buffers
    "positions from arange": Fault(
        [(IN_ATTN, "        positions = torch.arange(x.size(1)).expand(x.shape[:2])\n" + IN_ATTN)],
        "cp=2", "refused", ["take positions from its argument", "blocks.0.attn.core receives other"],
    ),
    "a mask of max_tokens": Fault(
        [(CORE, "mask = torch.ones(32, 32, dtype=torch.bool).tril()\n        "
          + CORE.replace("is_causal=True", "attn_mask=mask"))],
        "dp_shard=2", "refused", ["half of a sequence fails in blocks.0.attn.core"],
    ),
    "a mask kept from the first call": Fault(
        [
            ("class Core(nn.Module):\n", "class Core(nn.Module):\n    mask = None\n\n"),
            (CORE, "if self.mask is None:\n            self.mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool)"
             ".tril()\n        " + CORE.replace("is_causal=True", "attn_mask=self.mask")),
        ],
        "dp_shard=2", "refused",
        ["outputs for 1 row of 14 tokens after 3 rows of 28 tokens", "keeps blocks.0.attn.core.mask", "fails"],
    ),
    "a buffer with values": Fault(
        [(FFN_INIT, FFN_INIT + "\n        self.register_buffer('factor', torch.full((1,), 0.5))"),
         *before_ffn("x = x * self.factor")],
        "dp_shard=2", "refused", ["buffer blocks.*.ffn.factor would lose its values"],
    ),
    "a rotary cache that is not saved": Fault(
        [("self.core = Core()", "self.core = Core()\n        "
          "self.register_buffer('cos', torch.arange(64.0).cos(), persistent=False)"),
         (IN_ATTN, "        x = x + self.cos[positions][..., None]\n" + IN_ATTN)],
        "dp_shard=2", "refused", ["buffer blocks.*.attn.cos would lose its values"],
    ),
    "a table of the meta device": Fault(
        [(FFN_INIT, FFN_INIT + "\n        self.table = torch.arange(64.0)"),
         *before_ffn("x = x * self.table[:1]")],
        "dp_shard=2", "refused", ["ffn stores a tensor as table", "compute it in forward"],
    ),
    "heads of the config": Fault(
        [(UNFLATTEN, "unflatten(-1, (self.c.num_heads, -1))")],
        "tp=2", "refused", ["heads and sizes from weight shapes", "attn.core gets"],
    ),
    # weights and positions written in forward, dependence on the row length
    "a weight normalised in place": Fault(
        before_ffn("w = self.down.weight.data", "w.div_(w.norm(dim=-1, keepdim=True))"),
        "tp=2", "refused", ["changes the weight blocks.0.ffn.down.weight in forward", "F.normalize"],
    ),
    "an embedding with a largest norm": Fault(
        [(EMBED_INIT, EMBED_INIT.replace("c.dim)", "c.dim, max_norm=1.0)"))],
        "tp=2", "refused", ["changes the weight embed.weight in forward", "avoid max_norm"],
    ),
    "positions moved in place": Fault(
        [(EMBEDDED, "positions += 2\n        " + EMBEDDED)],
        "pp=2", "refused", ["modifies the tokens or positions in place", "positions = positions + 2"],
    ),
    "a temperature by the length of a row": Fault(
        [(IN_ATTN, "        x = x * x.size(1) ** 0.5\n" + IN_ATTN)],
        "cp=2", "refused",
        ["for half of a sequence, with its positions, than in the full sequence", "blocks.0.attn.core receives other"],
    ),
    "angles by the largest position": Fault(
        [("angles = positions[..., None, None] *", "angles = positions[..., None, None] / (8 + positions.max()) *")],
        "cp=2", "refused",
        ["for half of a sequence, with its positions, than in the full sequence", "blocks.0.attn.core receives other"],
    ),
    # the layout
    "a convolution as a linear": Fault(
        [(FFN_INIT, FFN_INIT.replace("nn.Linear(c.dim, 2 * c.dim)", "nn.Conv1d(c.dim, 2 * c.dim, 1)")),
         (IN_FFN, IN_FFN.replace("self.up(x)", "self.up(x.mT).mT"))],
        "tp=2", "refused", ["is for nn.Linear, and blocks.0.ffn.up is of class Conv1d", "per_head"],
    ),
    "rowwise on a part of the sequence": Fault(
        [("self.drop = nn.Dropout(c.dropout)", "self.drop, self.mix = nn.Dropout(c.dropout), nn.Linear(c.dim, c.dim)"),
         (IN_BLOCK, "        x = x + self.mix(x)\n" + IN_BLOCK),
         ('"blocks.*.*.*.bias": Draw("zeros"),', '"blocks.*.*.*.bias": Draw("zeros"),\n        '
          '"blocks.*.mix.*": Draw("normal", std=0.02),'),
         ("dropout: float = 0.1", "dropout: float = 0.0"),
         ('"blocks.*.ffn_norm": "sequence"', '"blocks.*.ffn_norm": "sequence", "blocks.*.mix": "rowwise"')],
        "tp=2", "not possible", ["blocks.0.mix", '"rowwise" needs the full sequence', 'write "router"'], True,
    ),
    "new zeros from a gathered tensor": Fault(
        [("turn(k, positions), v)", "turn(k, positions), v + x.new_zeros(v.shape))"),
         ("dropout: float = 0.1", "dropout: float = 0.0")],
        "tp=2", "failed", ["in module blocks.0.attn: a gathered tensor is a DTensor", "q.new_zeros"], True,
    ),
    "colwise where rowwise": Fault(
        [('"blocks.*.ffn.down": "rowwise"', '"blocks.*.ffn.down": "colwise"')],
        "tp=2", "refused", ['declares blocks.0.ffn.down "colwise"', 'declare it "rowwise"'],
    ),
    "replicate where rowwise": Fault(
        [('"blocks.*.attn.out": "rowwise"', '"blocks.*.attn.out": "replicate"')],
        "tp=2", "refused",
        ['declares blocks.0.attn.out "replicate"', "its input is sharded along the feature", 'declare it "rowwise"'],
    ),
    "rowwise where colwise": Fault(
        [('"blocks.*.ffn.up": "colwise"', '"blocks.*.ffn.up": "rowwise"')],
        "tp=2", "refused", ['declares blocks.0.ffn.up "rowwise"', 'declare it "colwise"'],
    ),
    "replicate next to split features": Fault(
        [(FFN_INIT, FFN_INIT + "\n        self.gate = nn.Linear(c.dim, 2 * c.dim)"),
         (IN_FFN, "return self.down(F.gelu(self.up(x)) * self.gate(x))"),
         ('"blocks.*.ffn.up": "colwise"', '"blocks.*.ffn.up": "colwise", "blocks.*.ffn.gate": "replicate"')],
        "tp=2", "refused",
        ['declares blocks.0.ffn.gate "replicate"', "sharded along the feature dimension", 'declare it "colwise"'],
    ),
    "a norm on the sequence declared replicated": Fault(
        [('"blocks.*.ffn_norm": "sequence"', '"blocks.*.ffn_norm": "replicate"'),
         ("dropout: float = 0.1", "dropout: float = 0.0")],
        "tp=2", "not possible", ["blocks.0.ffn_norm", '"replicate" needs the full', 'write "sequence"'], True,
    ),
    "a weight without a style": Fault(
        [('        "blocks.*.ffn.up": "colwise",\n', "")],
        "tp=2", "refused", ["blocks.*.ffn.up.weight matches 0 rules"],
    ),
    "a path around the layers": Fault(
        [("return self.head(self.norm(x))", "return self.head(self.norm(x + self.embed(tokens)))")],
        "pp=2", "not possible", ["forward is a chain"],
    ),
    "layers in a list of Python": Fault(
        [("self.blocks.values()", "self.order"),
         (HEAD_INIT, HEAD_INIT + "        self.order = list(self.blocks.values())\n")],
        "pp=2", "not possible", ["forward is a chain"],
    ),
    "every second layer skipped": Fault(
        [("for block in self.blocks.values():", "for block in list(self.blocks.values())[::2]:")],
        "pp=2", "not possible", ["forward is a chain"],
    ),
    "one block for two layers": Fault(
        [("self.norm = nn.LayerNorm(c.dim)\n", "self.norm = nn.LayerNorm(c.dim)\n        self.blocks['1'].ffn = "
          "self.blocks['0'].ffn\n")],
        "dp_shard=2", "refused", ["shares one weight between blocks.0.ffn.up.weight and blocks.1.ffn.up.weight"],
    ),
    "a number of the stage": Fault(
        [("for block in self.blocks.values():", "for i, block in enumerate(self.blocks.values()):\n"
          "            x = x * (1 + i)")],
        "pp=2", "not possible", ["forward is a chain"],
    ),
    "a number read by the model": Fault(
        [(EMBEDDED, EMBEDDED + "        assert positions.max().item() >= 0\n")],
        "pp=2", "not possible", ["reads tensor values, but is traced", "read values (.item(), int(x), if x > 0)"], True,
    ),
    "an additional loss in backward": Fault(
        [
            ("class FeedForward(", "class Aux(torch.autograd.Function):\n"
             "    @staticmethod\n    def forward(ctx, x, aux):\n        return x.clone()\n\n"
             "    @staticmethod\n    def backward(ctx, gradient):\n        return gradient, torch.ones(())\n\n\n"
             "class FeedForward("),
            (IN_FFN, "y = self.down(F.gelu(self.up(x)))\n        return Aux.apply(y, 0.01 * y.square().mean())"),
            ("dropout: float = 0.1", "dropout: float = 0.0"),
        ],
        "dp_shard=2", "differs", ["not divided by the number of tokens", "so it counts 4 times"], True,
    ),
    "a head that is the embedding": Fault(
        [("return self.head(self.norm(x))", "return F.linear(self.norm(x), self.embed.weight)")],
        "pp=2", "not possible", ["forward is a chain"],
    ),
    "a core with its own scale": Fault(
        [(CORE, CORE.replace("is_causal=True", "is_causal=True, scale=0.1"))],
        "cp=2", "not possible", ["blocks.0.attn.core"], True,
    ),
    "a core with a bias by distance": Fault(
        [(CORE, "T = torch.arange(q.size(2))\n        bias = (T - T[:, None]) * 0.3 + torch.full((len(T),) * 2, "
          "-torch.inf).triu(1)\n        " + CORE.replace("is_causal=True", "attn_mask=bias"))],
        "cp=2", "not possible", ["blocks.0.attn.core"], True,
    ),
}  # fmt: skip


RIGHT: dict[str, list[tuple[str, str]]] = {
    "a mask for each length": cached("if Core.kept is None:", "    Core.kept = {}", "if n not in Core.kept:",
                                     "    Core.kept[n] = mask(n)", "m = Core.kept[n]"),
    "a mask that grows": cached("if Core.kept is None or len(Core.kept) < n:", "    Core.kept = mask(n)",
                                "m = Core.kept[:n, :n]"),
    "a mask that grows on the module": cached("if self.kept is None or len(self.kept) < n:", "    self.kept = mask(n)",
                                              "m = self.kept[:n, :n]"),
    "a mask of another length": cached("if Core.kept is None or len(Core.kept) != n:", "    Core.kept = mask(n)",
                                       "m = Core.kept"),
    "a mask of the longest row": cached("if Core.kept is None:", "    Core.kept = mask(64)", "m = Core.kept[:n, :n]"),
    "a mask in lru_cache": [
        *cached("m = mask(n)"), ("def mask(n)", "import functools\n\n\n@functools.lru_cache\ndef mask(n)"),
    ],
    "a window in a table": [
        *cached("if Core.kept is None:", "    Core.kept = {}", "if n not in Core.kept:",
                "    Core.kept[n] = mask(n).triu(-7)", "m = Core.kept[n]"),
        ("    kept = None\n", "    kept = None\n    window = 8\n"),
    ],
    "a window of the longest row": [
        *cached("if Core.kept is None:", "    Core.kept = mask(64).triu(-7)", "m = Core.kept[:n, :n]"),
        ("    kept = None\n", "    kept = None\n    window = 8\n"),
    ],
    "a number read by a layer": [(IN_ATTN, "        assert positions.max().item() >= 0\n" + IN_ATTN)],
    "constant noise per feature": before_ffn(
        "g = torch.Generator().manual_seed(0)", "x = x * torch.rand(x.shape[-1:], generator=g)"
    ),
    "a scale module with the recommended style": [
        ("class Block(", "class Scale(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
         "        self.gamma = nn.Parameter(torch.ones(dim))\n\n    def forward(self, x):\n"
         "        return x * self.gamma\n\n\nclass Block("),
        ("self.drop = nn.Dropout(c.dropout)", "self.drop, self.scale = nn.Dropout(c.dropout), Scale(c.dim)"),
        (IN_BLOCK, "        x = self.scale(x)\n" + IN_BLOCK),
        ('"blocks.*.ffn_norm": "sequence"', '"blocks.*.ffn_norm": "sequence", "blocks.*.scale": "sequence"'),
        ('"*.weight": Draw("normal", std=0.02),\n', '"*.weight": Draw("normal", std=0.02),\n'
         '        "blocks.*.scale.gamma": Draw("normal"),\n'),
    ],
}  # fmt: skip
"""Correct models that keep state between passes, or resemble a fault."""


def changed_model(changes: list[tuple[str, str]]) -> str:
    """Return the sound model with these changes."""
    text = SOUND
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


ON_MESHES = [
    name
    for name in RIGHT
    if name not in ("a window of the longest row", "constant noise per feature")
]
"""Without the noise, which is combined with a gathered input: a DTensor under tp. docs/own_model.md has the fix."""
CHANGES = {name: fault.changes for name, fault in FAULTS.items()} | RIGHT


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Results of verify for the selected files and for the sound one, without running a mesh."""
    texts = {name: changed_model(CHANGES[name]) for name in sorted(chosen(request, "name"))} | {
        "sound": SOUND
    }
    return made_once(
        tmp_path_factory, "model-faults", lambda: ask(tmp_path_factory.mktemp("models"), texts)
    )


@pytest.mark.nightly(
    "sound models", by="tests/tools/verify/test_verify.py::test_clean_runs_give_no_alarm"
)
def test_the_recorded_claim_counts_these_faults():
    claims = json.loads((Path(__file__).parents[3] / "benchmarks/results/claims.json").read_text())
    assert claims["faults_in_model_files"]["planted"] == len(FAULTS)


def test_the_sound_model_has_no_findings(results):
    assert results["sound"] == {"broken": [], "notes": [DROPPED], "impossible": {}}


WITHOUT_MESH = [name for name, fault in FAULTS.items() if not fault.needs_mesh]


@pytest.mark.parametrize(
    "name",
    cases(
        WITHOUT_MESH[::3], nightly=[name for name in WITHOUT_MESH if name not in WITHOUT_MESH[::3]]
    ),
)
def test_a_fault_visible_without_a_mesh_is_named(name, results):
    fault = FAULTS[name]
    result = results[name]
    axis = fault.mesh.partition("=")[0]
    without_faults = "not possible" if axis in result["impossible"] else "same"
    verdict = "refused" if result["broken"] else without_faults
    cause = " ".join(result["broken"]) or result["impossible"].get(axis, "")
    print(f"\n{name:45} {fault.mesh:12} {verdict:12} {cause}")

    assert verdict == fault.verdict, cause
    for text in fault.cause:
        assert text in cause


@pytest.mark.parametrize("name", RIGHT)
def test_a_correct_model_has_no_findings_without_a_mesh(name, results):
    assert results[name] == {"broken": [], "notes": [DROPPED], "impossible": {}}


@pytest.mark.parametrize(
    "name",
    cases(["a window of the longest row"], nightly=ON_MESHES),
)
def test_a_correct_model_has_the_same_results_on_every_mesh(name, tmp_path, capsys):
    """Dropout is off, because the sound model would drop elements that two ranks must hold alike."""
    path = tmp_path / "model.py"
    path.write_text(
        changed_model(RIGHT[name]).replace("dropout: float = 0.1", "dropout: float = 0.0")
    )
    meshes = ("dp_shard=2", "tp=2", "cp=2", "pp=2")
    status = verify.main([str(path), "--mesh", *meshes, "--steps", "1", "--json"])

    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.nightly)
        for name in FAULTS
    ],
)
def test_the_command_names_a_fault_in_a_model_file(name, tmp_path):
    fault = FAULTS[name]
    path = tmp_path / "model.py"
    out = io.StringIO()
    path.write_text(changed_model(fault.changes))
    try:
        with contextlib.redirect_stdout(out):
            verify.main([str(path), "--mesh", fault.mesh, "--steps", "1", "--json"])
        (row,) = json.loads(out.getvalue())["rows"]
        verdict = row["verdict"]
        cause = f"{row['first']} {row['cause']}"
    except ConfigError as error:
        verdict = "refused"
        cause = str(error)
    print(f"\n{name:45} {fault.mesh:12} {verdict:12} {cause}")

    assert verdict == fault.verdict, cause
    for text in fault.cause:
        assert text in cause

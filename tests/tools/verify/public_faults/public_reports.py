"""Public reports of silent faults in distributed training, and the planted fault that reproduces each situation."""

from __future__ import annotations

from dataclasses import dataclass

MEGATRON_7452 = "https://github.com/NVIDIA/Megatron-LM/issues/7452"
TTRACE = "https://arxiv.org/abs/2506.09280"


@dataclass(frozen=True)
class PublicReport:
    """A report and the fault that reproduces its situation.

    Attributes:
        name: Short name of the report.
        link: Address of the report.
        situation: What goes wrong, in our words.
        file: "here" for ``test_public_faults.py``, else the test file that plants the fault.
        fault: Name of the fault in that file.
    """

    name: str
    link: str
    situation: str
    file: str
    fault: str


def megatron(number: int, situation: str, file: str, fault: str) -> PublicReport:
    """Return one of the thirteen findings of the issue."""
    return PublicReport(f"Megatron-LM 7452, {number}", MEGATRON_7452, situation, file, fault)


def ttrace(situation: str, file: str, fault: str, issue: int = 0) -> PublicReport:
    """Return a fault after those of the paper. ``issue`` is a Megatron-LM report of the same situation.

    The wording and the order are ours, and were not compared with the paper's table.
    """
    if issue:
        return PublicReport(
            f"Megatron-LM {issue}",
            f"https://github.com/NVIDIA/Megatron-LM/issues/{issue}",
            situation,
            file,
            fault,
        )
    return PublicReport("TTrace", TTRACE, situation, file, fault)


def other(name: str, link: str, situation: str, file: str, fault: str) -> PublicReport:
    """Return a report of another project."""
    return PublicReport(name, f"https://github.com/{link}", situation, file, fault)


ENGINE = "test_faults.py"
PRECISION = "test_precision.py"
HERE = "here"

REPORTS = (
    megatron(1, "label smoothing over the columns of each rank", HERE, "smoothing over the columns of each rank"),
    megatron(2, "gathered logits counted once per rank: log(tp) too much loss", HERE, "logits counted once per rank"),
    megatron(3, "a loss divided by the token count of each rank", ENGINE, "each rank divides by its own count"),
    megatron(4, "recomputation gathers from another replica", HERE, "recomputation of another replica"),
    megatron(5, "a token mask cut for another rank", HERE, "targets of another part of the sequence"),
    megatron(6, "a projection summed over the wrong group", HERE, "a projection summed over the wrong group"),
    megatron(7, "embeddings scattered in the wrong group", HERE, "embeddings of the first part on all ranks"),
    megatron(8, "the norm misses attention sinks of other ranks", HERE, "attention sinks missing in the norm"),
    megatron(9, "a mean of means over parts of the sequence", HERE, "each part divides by its own count"),
    megatron(10, "the balance loss multiplied by the group size", ENGINE, "the balance loss counted three times"),
    megatron(11, "the gradient of a norm not summed over tp", ENGINE, "norms of the split sequence not reduced"),
    megatron(12, "weights keyed by the layer number within a stage", HERE, "weights keyed by the number in the stage"),
    megatron(13, "attention over an outdated context group", ENGINE, "a block missing in the ring"),
    ttrace("a wrong mask of the split vocabulary", ENGINE, "the vocabulary of each rank starts at zero"),
    ttrace("recomputation from a wrong input", HERE, "recomputation from a changed input"),
    ttrace("a wrong loss scale under cp", ENGINE, "gradients averaged over parts of the sequence", 673),
    ttrace("a wrong loss scale under data parallelism", ENGINE, "gradients averaged over shards"),
    ttrace("embedding and head untied by a sharded optimizer", HERE, "a tied head without gradient"),
    ttrace("a parameter that is never updated", ENGINE, "one parameter is not updated"),
    ttrace("router weights not synchronized", HERE, "gradients of routers not reduced"),
    ttrace("a float8 scale of the wrong group", PRECISION, "a float8 scale of each shard"),
    ttrace("updates lost between sharding and gathering", ENGINE, "updated slices not gathered"),
    ttrace("layers divided wrongly over stages", ENGINE, "layers on the wrong stage"),
    ttrace("a gradient lost by overlapped communication", HERE, "the gradient through queries lost"),
    ttrace("wrong attention gradients under cp", ENGINE, "gradients of keys of other ranks lost", 1464),
    ttrace("norm gradients not synchronized under tp", ENGINE, "norms of the split sequence not reduced", 1446),
    ttrace("norm gradients wrong under tp and cp", ENGINE, "reduction over parts of the sequence skipped"),
    other("torchtitan 2972", "pytorch/torchtitan/issues/2972",
          "pipeline gradients not divided by the token count", HERE, "pipeline gradients not divided"),
    other("torchtitan 2318", "pytorch/torchtitan/issues/2318",
          "the norm counts every replica", ENGINE, "norm counts each replica"),
    other("torchtitan 3280", "pytorch/torchtitan/issues/3280",
          "the reported loss is halved", HERE, "the reported loss halved"),
    other("torchtitan 1732", "pytorch/torchtitan/pull/1732",
          "gradient accumulation broken", ENGINE, "the first micro batch dropped"),
    other("torchtitan 4598", "pytorch/torchtitan/pull/4598",
          "a replica resumes with another learning rate", ENGINE, "a learning rate of each rank"),
    other("DeepSpeed 5618", "microsoft/deepspeed/issues/5618",
          "expert gradients multiplied by the number of ranks", HERE, "expert gradients multiplied by ep"),
    other("DeepSpeed 8491", "deepspeedai/DeepSpeed/pull/8491",
          "no gradient through the exchange of heads", HERE, "no gradient through the exchange of heads"),
    other("TRL 7245", "huggingface/trl/issues/7245",
          "the wrapper is bypassed, so gradients are never reduced", ENGINE, "gradients never synchronised"),
    other("Megatron-LM 7186", "NVIDIA/Megatron-LM/pull/7186",
          "only the last micro-batch reaches the optimizer", ENGINE, "only the last micro batch counts"),
    other("ms-swift 9947", "modelscope/ms-swift/pull/9947",
          "no gradient on ranks without the target's column", HERE, "columns of one rank without gradient"),
    other("DeepSpeed 1801", "OrderLab/machine-learning-issues/tree/main/DeepSpeed-1801",
          "copies of a norm drift apart under tp", ENGINE, "copies of a parameter drift apart"),
)  # fmt: skip

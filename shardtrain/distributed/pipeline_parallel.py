"""Pipeline parallelism: each rank holds some layers, and micro-batches flow through the ranks.

Uses PyTorch's schedules: GPipe (Huang et al. 2019), 1F1B and interleaved (Narayanan et al. 2021), and
zero bubble (Qi et al. 2023).

A stage is the model without the layers of other stages. ``chain.Absent`` replaces first and last modules
that are on other stages. So parameter names never change. With gradient accumulation, a pass through the
schedule has more micro-batches, so a step still has only one pipeline bubble.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from shardtrain.config import derived, stages
from shardtrain.config.schema import Config
from shardtrain.distributed import chain, expert_parallel, fsdp, hf_experts, hf_stages
from shardtrain.distributed.chain import ChainNames
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.cores import TokenBatch
from shardtrain.distributed.embedding_noise import EmbeddingNoise
from shardtrain.distributed.hf_balance import GlobalBalance
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.multi_token_loss import MultiTokenLoss
from shardtrain.distributed.runner import ModelParts, Runner
from shardtrain.distributed.source_losses import SourceLosses
from shardtrain.distributed.tied_stages import TiedStages
from shardtrain.layout import Layout, mtp_modules
from shardtrain.ops.tied import tied_names
from shardtrain.ops.user_state import trial
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "pp"


def cut(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> list[nn.Module]:
    """Return the stages of this rank as models with fewer layers, in the order of the forward pass.

    Raises:
        ConfigError: ``module_fqns_per_model_part`` does not cover the model, or its forward is not a chain.
    """
    # Check this first. If the forward is not a chain, stages would silently compute wrong results.
    parts = check(model, layout, config)
    own_modules = [set(parts[index]) for index in _own_stages(mesh, config, len(parts))]
    if hf_stages.is_hf(model):
        hf_chain = hf_stages.trace(model)
        return [hf_stages.cut(copy.deepcopy(model), hf_chain, modules) for modules in own_modules]
    return [stage(copy.deepcopy(model), layout, modules) for modules in own_modules]


def check(model: nn.Module, layout: Layout, config: Config) -> list[list[str]]:
    """Return the names of the modules of each stage.

    Raises:
        ConfigError: ``module_fqns_per_model_part`` does not cover the model, or its forward is not a chain.
    """
    if hf_stages.is_hf(model):
        hf_chain = hf_stages.trace(model)
        parts = hf_chain.names.per_stage(config.parallelism)
        _check_parts(parts, hf_chain.names)
        hf_stages.check(model, hf_chain, parts)
        return parts
    names = chain.names_of(model, layout)
    parts = names.per_stage(config.parallelism)
    _check_parts(parts, names)
    chain.check(model, layout, parts, config.parallelism.pipeline_parallel_degree)
    return parts


def chain_names(model: nn.Module, layout: Layout) -> ChainNames:
    """Return the names of a model's modules in the order of its forward."""
    if hf_stages.is_hf(model):
        return hf_stages.trace(model).names
    return chain.names_of(model, layout)


def stage(model: nn.Module, layout: Layout, keep: set[str]) -> nn.Module:
    """Turn a model into one of its stages, in place. Only the modules named in ``keep`` stay."""
    layers: nn.ModuleDict = getattr(model, layout.layers)
    for name in list(layers):
        if f"{layout.layers}.{name}" not in keep:
            del layers[name]
    for name in (*layout.first, *layout.last):
        if name not in keep:
            setattr(model, name, chain.Absent())
    # Multi-token prediction is on the stage of the head
    if layout.last[-1] not in keep:
        for name in mtp_modules(model, layout):
            setattr(model, name, nn.ModuleDict())
    return model


def _own_stages(mesh: Mesh, config: Config, num_stages: int) -> list[int]:
    return _stages_of(mesh.rank(AXIS), mesh, config, num_stages)


def _stages_of(rank: int, mesh: Mesh, config: Config, num_stages: int) -> list[int]:
    name = stages.schedule_name(config.parallelism.pipeline_parallel_schedule) or ""
    return stages.stages_of_rank(name, rank, mesh.size(AXIS), num_stages)


def _check_parts(parts: list[list[str]], names: ChainNames) -> None:
    """Raise ConfigError unless the stages contain each module of the model once, in order."""
    modules = [path for part in parts for path in part]
    expected = names.paths
    if modules == expected:
        return
    differences = sorted(set(expected) ^ set(modules)) or "the order"
    option = "parallelism.module_fqns_per_model_part"
    fix = f"name each once, in this order: {', '.join(expected)}"
    raise ConfigError(Problem(option, None, f"does not cover the model: {differences}", fix))


class _Stage(PipelineStage):
    """PyTorch's stage with fixes for two types of schedules.

    Schedules that split the backward pass: PyTorch computes the gradients of the module's current parameters.
    These must be the gathered weights that forward used. After forward, an FSDP unit may have replaced them
    with its shards, and PyTorch would silently skip the gradients. So the weights are gathered first.

    V-shaped schedules: in evaluation, they would send gradients that do not exist. In the middle of the V,
    two stages of the same rank exchange tensors, which needs no communication.

    Attributes:
        row_users: objects that must know the rows of a forward pass.
        rows: rows of a micro-batch.
    """

    row_users: Sequence[EmbeddingNoise | SourceLosses] = ()
    rows = 1

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *others: Any, **keywords: Any) -> Any:
        for user in self.row_users:
            user.use_rows(fwd_chunk_id * self.rows, self.rows)
        return super().forward_one_chunk(fwd_chunk_id, args, *others, **keywords)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full":
            fsdp.gather(self.submod)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # Skip the exchange in the middle of a V, because gloo cannot connect a rank to itself (torch 2.11).
        return [
            op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank
        ]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _no_separate_weights() -> Callable[[], None]:
    """Return the backward pass for the weights of a stage whose weight gradients are not separate.

    It does nothing, because the backward pass for the inputs has already computed these gradients.
    """
    return lambda: None


class PipelineRunner(Runner):
    """Runner of the stages of this rank, with one of PyTorch's schedules."""

    def __init__(
        self, parts: ModelParts, unsplit_model: nn.Module, layout: Layout, vocab_size: int
    ) -> None:
        super().__init__(parts)
        self._depths = None
        if parts.num_depths:
            self._depths = MultiTokenLoss(parts.num_depths, parts.mesh, parts.config)
        config = parts.config
        mesh = parts.mesh
        names = chain_names(unsplit_model, layout)
        num_stages = stages.num_stages(config.parallelism, len(names.layer_names))
        self._indices = _own_stages(mesh, config, num_stages)
        self._last = num_stages - 1
        modules = names.per_stage(config.parallelism)
        if parts.num_depths:
            modules[-1] += mtp_modules(unsplit_model, layout)
        # stage -> index of its rank on the axis pp
        ranks: dict[int, int] = {}
        for rank in range(mesh.size(AXIS)):
            ranks |= dict.fromkeys(_stages_of(rank, mesh, config, num_stages), rank)
        self.ranks_of_stages = [ranks[index] for index in range(num_stages)]
        self._ties = TiedStages(tied_names(unsplit_model), modules, self.ranks_of_stages, mesh)
        self._weight = torch.ones((), device=mesh.device)
        self._computes_loss = True
        """False during a pass that only counts the experts' tokens."""
        self._positions_name = _positions_name(unsplit_model)
        hidden = _hidden_size(unsplit_model, layout)
        self._features = hidden
        # Number of ranks that split sequences between layers. Tensor parallelism splits them, except in
        # transformers networks.
        self.sequence_ranks = 1 if hf_stages.is_hf(unsplit_model) else mesh.size("tp")
        self._vocab_size = vocab_size
        # With recomputation, compute the gradients of weights together with those of the inputs. Otherwise a
        # separate pass would run for each group of weights, and each pass would recompute the layer.
        recomputes = config.activation_checkpoint.mode in ("full", "selective")
        # PyTorch also fails to separate them if the graph differs between micro-batches, as the loops over
        # lists of experts do (torch 2.13).
        self._keeps_together = recomputes or any(hf_experts.has_lists(part) for part in self.parts)
        accumulation = derived.accumulation_steps(config, mesh.device_mesh.size())
        rows = config.training.local_batch_size * accumulation
        micro_batches = rows // config.parallelism.pipeline_parallel_microbatch_size
        self.prepare(micro_batches, config.training.seq_len // mesh.size("cp"))

    def prepare(self, micro_batches: int, tokens: int, parts: int = 1) -> None:
        """Build the stages and the schedule for passes of a number of micro-batches.

        Args:
            tokens: number of tokens of a row on this rank.
            parts: number of rows into which a sequence ramp divides each row. A micro-batch has all of them.
        """
        self._prepared = (micro_batches, tokens)
        num_stages = self._last + 1
        rows = self._config.parallelism.pipeline_parallel_microbatch_size * parts
        self._stages = []
        for part, index in zip(self.parts, self._indices, strict=True):
            # PyTorch fails to separate the gradients of weights too if some outputs depend on other inputs
            # than that of the stage, such as the embeddings of multi-token prediction (torch 2.13).
            has_other_inputs = self.model_parts.num_depths > 0 and index == self._last
            builder = None
            if self._keeps_together or has_other_inputs:
                builder = _no_separate_weights
            new_stage = _Stage(
                part,
                index,
                num_stages,
                self._mesh.device,
                # Pass the shapes here. Otherwise the stages would send each other pickled shapes in the
                # first step.
                input_args=self._input(index, rows, tokens),
                output_args=self._output(index, rows, tokens),
                group=self._mesh.group(AXIS),
                dw_builder=builder,
            )
            new_stage.rows = rows
            if index == 0 and self.embedding_noise is not None:
                new_stage.row_users = [self.embedding_noise]
            # the loss follows the forward pass of the last stage
            if index == self._last and self.source_losses is not None:
                new_stage.row_users = [self.source_losses]
            self._stages.append(new_stage)
        self._schedule = self._build_schedule(micro_batches)

    def _prepare_for(self, batches: Sequence[TokenBatch]) -> None:
        """Build stages and schedule again if a ramp has changed the shape of a step."""
        training = self._config.training
        if not (training.batch_ramp or training.sequence_ramp):
            return
        length = batches[0].tokens_BT.size(1)
        parts = training.seq_len // length
        num_rows = sum(batch.tokens_BT.size(0) for batch in batches)
        size = self._config.parallelism.pipeline_parallel_microbatch_size
        shape = (num_rows // (size * parts), length // self._mesh.size("cp"))
        if shape != self._prepared:
            self.prepare(*shape, parts)

    def _input(self, index: int, rows: int, tokens: int) -> Tensor:
        """Return a meta tensor in the shape of a stage's input: tokens, or the previous stage's output."""
        if index == 0:
            return torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        return self._output(index - 1, rows, tokens)

    def _output(self, index: int, rows: int, tokens: int) -> Tensor:
        """Return a meta tensor in the shape of a stage's output: activations, or this rank's part of the logits."""
        if index == self._last:
            rows *= 1 + self.model_parts.num_depths
        shape = self.output_shape(index, rows, tokens)
        return torch.empty(shape, dtype=self.activation_dtype, device="meta", requires_grad=True)

    @property
    def indices(self) -> list[int]:
        """Indices of this rank's stages."""
        return self._indices

    @property
    def activation_dtype(self) -> torch.dtype:
        """Data type of the tensors that stages exchange."""
        return getattr(torch, derived.compute_dtype(self._config))  # type: ignore[no-any-return]

    def output_shape(self, index: int, rows: int, tokens: int) -> tuple[int, ...]:
        """Return the shape of a stage's output for ``rows`` rows with ``tokens`` tokens on this rank."""
        if index == self._last:
            return rows, tokens, _vocabulary_columns(self._vocab_size, self._mesh, self._config)
        return rows, tokens // self.sequence_ranks, self._features

    @property
    def has_loss(self) -> bool:
        """True if this rank holds the last stage."""
        return self._last in self._indices

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: copies[0] for name, copies in self._ties.parameters(self.parts).items()}

    def counted_parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: p for name, p in self.parameters().items() if self._ties.is_counted_here(name)
        }

    def measures(self) -> dict[str, float]:
        measures = super().measures()
        if self._depths is not None:
            measures |= self._depths.measures()
        return measures

    def forward_backward(self, batches: Sequence[TokenBatch], weight: Tensor) -> Tensor:
        """Run all batches as micro-batches of one pass through the schedule."""
        self._prepare_for(batches)
        if self._has_experts:
            expert_parallel.before_step(self.parts, weight)
        self._weight = weight
        if self.token_metrics:
            self.token_metrics.start()
        if self._depths is not None:
            self._depths.begin_step(batches)
        self._ties.copy_weights(self.parts)
        if self._before_pass:
            self._before_pass()
        if self._balance is not None:
            loss = self._run_with_balance_loss(self._balance, batches, weight)
        else:
            loss = self._run(self._schedule.step, batches)
        # Now that all micro-batches are done, add up the gradients of parameters that stages share.
        self._ties.sum_gradients(self.parts)
        return loss

    def _run_with_balance_loss(
        self, balance: GlobalBalance, batches: Sequence[TokenBatch], weight: Tensor
    ) -> Tensor:
        """Run a step after a pass that counts the experts' choices in all stages.

        The balance loss depends on all counts, so it needs them before the first backward pass of any stage.
        """
        with balance.step():
            self._computes_loss = False
            try:
                balance.count(lambda: self._run(self._schedule.eval, batches))
            finally:
                self._computes_loss = True
            balance.sum_over_ranks(batches, weight)
            return self._run(self._schedule.step, batches)

    def evaluate(self, batch: TokenBatch) -> Tensor:
        """Return the loss sum of a batch, which must have the number of rows of a training step."""
        self._prepare_for([batch])
        self._weight = torch.ones((), device=self._mesh.device)
        self._ties.copy_weights(self.parts)
        if self._before_pass:
            self._before_pass()
        with torch.no_grad():
            return self._run(self._schedule.eval, [batch])

    def _run(self, method: Any, batches: Sequence[TokenBatch]) -> Tensor:
        # Join this rank's parts of all batches. The schedule divides the rows into micro-batches.
        pieces = [self._cut(batch) for batch in batches]
        tokens, targets, positions = zip(*pieces, strict=True)
        tokens_Bt = torch.cat(tokens)
        targets_Bt = torch.cat(targets)
        positions_Bt = torch.cat(positions)
        losses: list[Tensor] = []
        keywords: dict[str, Any] = {
            self._positions_name: positions_Bt,
            **context_parallel.document_argument(batches),
        }
        if self._depths is not None:
            # Evaluation passes them too, because the shape of a stage's output is fixed
            ahead = [self._depths.cut(batch) for batch in batches]
            keywords["next_tokens_BTK"] = torch.cat([tokens_BtK for tokens_BtK, _ in ahead])
            targets_BtK = torch.cat([targets_BtK for _, targets_BtK in ahead])
            targets_Bt = torch.cat((targets_Bt.unsqueeze(-1), targets_BtK), dim=-1)
        if self.has_loss:
            keywords |= {"target": targets_Bt, "losses": losses}
        if "return_outputs" in inspect.signature(method).parameters:
            # otherwise all logits of a step would stay in memory
            keywords["return_outputs"] = False
        # Only the first stage receives tokens. The others receive activations from the previous stage.
        arguments = (tokens_Bt,) if 0 in self._indices else ()
        method(*arguments, **keywords)
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return torch.stack([loss.detach() for loss in losses]).sum(dtype=torch.float64)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch: logits (B, t, V) and targets (B, t).

        With multi-token prediction they are ((1 + K) B, t, V) and (B, t, 1 + K).
        """
        if not self._computes_loss:
            return logits.new_zeros(())
        if self._depths is None:
            return self._loss_of_logits(logits, targets, self._weight)
        main_BtV, depths = self._depths.split(logits)
        loss = self._loss_of_logits(main_BtV, targets[..., 0].contiguous(), self._weight)
        if torch.is_grad_enabled():
            return self._depths.add(
                loss, depths, targets[..., 1:], self._weight, self._plain_loss_of_logits
            )
        return loss

    def _build_schedule(self, micro_batches: int) -> Any:
        p = self._config.parallelism
        options: dict[str, Any] = {
            "n_microbatches": micro_batches,
            "loss_fn": self._loss,
            "scale_grads": False,  # the loss is already divided by the global number of tokens
        }
        if p.pipeline_parallel_schedule_csv:
            schedule = _PipelineScheduleRuntime(self._stages, **options)
            schedule._load_csv(p.pipeline_parallel_schedule_csv)
            return schedule
        kind = get_schedule_class(p.pipeline_parallel_schedule)
        if issubclass(kind, PipelineScheduleSingle):
            return kind(self._stages[0], **options)
        assert issubclass(kind, PipelineScheduleMulti)
        return kind(self._stages, **options)


class AllStages(nn.Module):
    """The full model on every pipeline rank, for forward passes without gradients on a few tokens.

    Each rank computes its stages and broadcasts their outputs. This is slow, because only one stage
    computes at a time.

    Attributes:
        config_name, hf: the attributes of a ``transformers`` network, which its checks need.
    """

    def __init__(self, runner: PipelineRunner) -> None:
        super().__init__()
        self.parts = nn.ModuleList(runner.parts)
        self.config_name = getattr(runner.parts[0], "config_name", "")
        self._runner = runner

    @property
    def hf(self) -> Any:
        """The ``transformers`` network in this rank's first stage."""
        return self.parts[0].hf

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, **documents: Tensor) -> Tensor:
        """Return the logits on every pipeline rank (a collective).

        With tensor parallelism, these are this rank's columns of the logits.
        """
        x = tokens_BT
        for index, rank in enumerate(self._runner.ranks_of_stages):
            shape = self._runner.output_shape(index, *tokens_BT.shape)
            x = self._run(index, rank, x, shape, positions_BT, documents)
        for part in self.parts:
            fsdp.free_gathered(part)
        return x

    def _run(
        self,
        index: int,
        rank: int,
        x: Tensor,
        shape: tuple[int, ...],
        positions: Tensor,
        documents: Any,
    ) -> Tensor:
        if index in self._runner.indices:
            part = self.parts[self._runner.indices.index(index)]
            out = part(x, positions, **documents).contiguous()
        else:
            out = torch.empty(shape, dtype=self._runner.activation_dtype, device=positions.device)
        group = self._runner.model_parts.mesh.group(AXIS)
        dist.broadcast(out, dist.get_global_rank(group, rank), group)
        return out  # type: ignore[no-any-return]


def _vocabulary_columns(vocab_size: int, mesh: Mesh, config: Config) -> int:
    """Return how many columns of the logits this tensor-parallel rank has."""
    if mesh.size("tp") == 1 or config.parallelism.disable_loss_parallel:
        return vocab_size
    per_rank = -(-vocab_size // mesh.size("tp"))
    return min(per_rank, vocab_size - per_rank * mesh.rank("tp"))


def _hidden_size(model: nn.Module, layout: Layout) -> int:
    """Return the number of features of the residual stream.

    Runs the model on the meta device until its first layer, and reads the shape of that layer's input.
    """
    if hf_stages.is_hf(model):
        return hf_stages.trace(model).features
    first_layer = next(iter(getattr(model, layout.layers).values()))
    handle = first_layer.register_forward_pre_hook(_stop_at_first_layer)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        with trial(model), torch.no_grad():
            model(token, token)
    except _FirstLayerReached as reached:
        return reached.features
    finally:
        handle.remove()
    raise AssertionError("the model's forward runs none of its layers")


class _FirstLayerReached(Exception):
    """Raised to end the forward pass before the first layer. Some layers cannot run on the meta device."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.features = features


def _stop_at_first_layer(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    raise _FirstLayerReached(inputs[0].shape[-1])


def _positions_name(model: nn.Module) -> str:
    """Return the name of the model's second argument, the positions. Stages receive them by keyword."""
    return list(inspect.signature(model.forward).parameters)[1]

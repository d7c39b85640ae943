"""Bytes of FSDP's buffers, gathered weights and unreduced gradients, at each moment of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable

from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.parameter_shards import sharded, trained, unsharded
from shardtrain.tools.plan.shapes import ModelShape, ParameterShape


class GatheredBytes:
    """Bytes of gathered weights and unreduced gradients at the moments of a step.

    By default, the last layer and the head stay gathered between forward and backward. Backward
    starts with the gradients of the head being reduced, the last layer gathered and the one before
    being gathered. It ends with the gradients of the embedding being reduced.

    Ranks that cast weights without FSDP have copies of all weights instead, each until its gradient
    is complete.

    Attributes:
        most: Sum of the largest buffers, which do not all exist at the same time.
        end_of_forward, loss, backward_of_head, backward_of_last, backward_of_layer,
            backward_of_embed: Bytes at each moment. ``backward_of_last`` is the last layer,
            ``backward_of_layer`` the first.
        layer_shard, head_shard, embed_shard, all_shards: Bytes of this rank's reduced gradients of
            one layer, the head, the embedding and the stage.
    """

    def __init__(self, model: ModelShape, job: PlannedJob, index: int) -> None:
        unit = _Units(model, job, index)
        layer_shards = []
        for parameters in unit.parameters_by_layer:
            layer_shards.append(_gradient_shards(trained(parameters), job))
        self.layer_shard = layer_shards[0] if layer_shards else 0
        self.head_shard = _gradient_shards(unit.trained_of_head, job)
        self.embed_shard = _gradient_shards(unit.trained_of_embed, job)
        self.all_shards = self.head_shard + self.embed_shard + sum(layer_shards)

        self.most = 0
        self.end_of_forward = 0
        self.loss = 0
        self.backward_of_head = 0
        self.backward_of_last = 0
        self.backward_of_layer = 0
        self.backward_of_embed = 0
        if job.copies:
            self._set_copies(unit, job)
        elif job.fsdp and job.frees_gathered:
            self._set_freed(unit, job)
        elif job.fsdp:
            self._set_kept(unit, job)

    def _set_copies(self, unit: _Units, job: PlannedJob) -> None:
        """Set the bytes of ranks that cast all weights. Backward frees each copy once its gradient is complete."""
        compute = job.compute_width
        all_weights = unit.all_weights * compute
        self.most = all_weights
        self.end_of_forward = all_weights
        self.loss = all_weights
        self.backward_of_head = all_weights
        self.backward_of_last = all_weights - unit.head * compute
        self.backward_of_layer = (unit.embed + unit.first_layer) * compute
        self.backward_of_embed = unit.embed * compute

    def _set_kept(self, unit: _Units, job: PlannedJob) -> None:
        """Set the bytes if weights stay gathered until their backward, which also produces unreduced gradients."""
        compute = job.compute_width
        reduce = job.reduce_width
        all_weights = unit.all_weights * compute
        self.end_of_forward = all_weights
        self.loss = all_weights
        self.backward_of_head = all_weights

        # Backward frees the weights of each unit. The gradients of the unit before are still being reduced.
        gradients_of_head = unit.head_gradient * reduce
        self.backward_of_last = all_weights - unit.head * compute + gradients_of_head
        first_weights = (unit.embed + unit.first_layer) * compute
        self.backward_of_layer = first_weights + unit.largest_gradient * reduce
        self.backward_of_embed = unit.embed * compute + unit.embed_gradient * reduce
        copies_of_last_layer = 1 if unit.is_last else 2
        self.most = all_weights + unit.head * compute
        self.most += unit.last_layer * compute * copies_of_last_layer

    def _set_freed(self, unit: _Units, job: PlannedJob) -> None:
        """Set the bytes if weights are freed after their forward.

        At most two layers are then gathered: the layer in use and the prefetched layer.
        """
        compute = job.compute_width
        reduce = job.reduce_width
        ranks = job.dp_shard * job.cp
        next_layer = 0
        pair = unit.largest
        if unit.num_layers > 1:
            next_layer = unit.largest
            pair = 2 * unit.largest
        if unit.has_experts and job.ep * job.cp * job.tp > 1:
            # Experts are their own unit, gathered next to the rest of the layer.
            pair = unit.largest
        root = unit.root
        separate_head = 0 if unit.is_head_in_root else unit.head
        next_unit = max(separate_head, next_layer)
        self.end_of_forward = (unit.last_layer + next_unit + root) * compute
        self.loss = root * compute
        # By default, FSDP keeps the units that backward needs first.
        if job.reshard == "default":
            self.loss = (unit.last_layer + separate_head + root) * compute

        # Backward has the unit in use and the prefetched unit, and reduces the gradients of the unit before.
        self.backward_of_head = (separate_head + pair + root) * compute
        reduced_head = _reduced(unit.head_gradient, ranks) * reduce
        self.backward_of_last = (pair + root) * compute + reduced_head
        reduced_layer = _reduced(unit.largest_gradient, ranks) * reduce
        self.backward_of_layer = (pair // 2 + root) * compute + reduced_layer
        self.backward_of_embed = _reduced(unit.embed_gradient, ranks) * reduce
        if job.tp > 1:
            self.backward_of_embed += unit.embed_gradient * compute

        # The largest buffers: during the reduction of the head or of a layer, and at the ends of the model.
        ends = unit.embed + unit.largest
        if root:
            ends = root + separate_head + pair
        largest_shard = unit.largest // ranks * compute
        self.most = max(
            unit.head_gradient * reduce + pair * compute + largest_shard,
            unit.largest_gradient * reduce + pair * compute,
            self.backward_of_embed,
            ends * compute,
        )


class _Units:
    """Elements of the weights that FSDP gathers together on one stage, and of their gradients.

    Attributes:
        embed, head: 0 if the stage has none. A tied head is the same tensor as the embedding, so it
            counts as zero.
        first_layer, last_layer, largest: Layers of the stage, 0 without layers.
        all_weights: All layers, the embedding and the head.
        root: Elements that stay gathered during the entire pass if layers are freed after their forward.
        is_head_in_root: ``root`` includes the head.
        trained_of_embed, trained_of_head: Their trained parameters.
        has_experts: A layer has stacked experts, which FSDP gathers separately if the mesh has several axes.
    """

    def __init__(self, model: ModelShape, job: PlannedJob, index: int) -> None:
        is_first = index == 0
        self.is_last = index == len(job.stages) - 1
        self.parameters_by_layer = []
        self.has_experts = False
        layers = []
        gradients = []
        for number in job.stages[index]:
            layer = model.layers[number]
            self.parameters_by_layer.append(layer.parameters)
            layers.append(unsharded(layer.parameters, job.tp, job.ep))
            gradients.append(unsharded(trained(layer.parameters), job.tp, job.ep))
            if any(parameter.style == "expert" for parameter in layer.parameters):
                self.has_experts = True
        self.num_layers = len(layers)
        self.first_layer = layers[0] if layers else 0
        self.last_layer = layers[-1] if layers else 0
        self.largest = max(layers, default=0)
        self.largest_gradient = max(gradients, default=0)

        # The first stage has the embedding. Multi-token prediction embeds the next tokens on the last stage, which
        # has a copy of the embedding, unless its head is tied and serves as the embedding.
        predicts_more = job.heads > 1 and self.is_last
        has_copy_of_embed = predicts_more and not model.tied
        self.embed = 0
        self.embed_gradient = 0
        self.trained_of_embed: tuple[ParameterShape, ...] = ()
        if is_first or has_copy_of_embed:
            self.trained_of_embed = trained(model.first)
            self.embed = unsharded(model.first, job.tp, job.ep)
            self.embed_gradient = unsharded(self.trained_of_embed, job.tp, job.ep)
        self.head = 0
        self.head_gradient = 0
        self.trained_of_head: tuple[ParameterShape, ...] = ()
        # On a stage that has both, a tied head is the embedding, which is already counted.
        is_separate_head = not (model.tied and is_first)
        if self.is_last and is_separate_head:
            self.trained_of_head = trained(model.last)
            self.head = unsharded(model.last, job.tp, job.ep)
            self.head_gradient = unsharded(self.trained_of_head, job.tp, job.ep)
        self.all_weights = sum(layers) + self.embed + self.head

        # FSDP leaves parameters in the root module if several modules share them. The root stays gathered during
        # the entire pass.
        self.is_head_in_root = predicts_more and is_first
        self.root = 0
        if model.tied or self.is_head_in_root:
            self.root = self.embed
        if self.is_head_in_root:
            self.root += self.head


def _gradient_shards(parameters: Iterable[ParameterShape], job: PlannedJob) -> int:
    """Return the bytes of this rank's reduced gradients of some parameters."""
    numel = sum(sharded(parameter, job) for parameter in parameters)
    return numel * job.gradient_bytes


def _reduced(gradient: int, ranks: int) -> int:
    """Return the elements of a gradient during its reduction: the unreduced gradient and the resulting shard."""
    return gradient + gradient // ranks

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
        is_first = index == 0
        is_last = index == len(job.stages) - 1
        parameters_by_layer = [model.layers[number].parameters for number in job.stages[index]]
        embed_trained = trained(model.first) if is_first else ()
        head_trained = trained(model.last) if is_last else ()

        # Elements. A tied head is the same tensor as the embedding, so it counts as zero.
        layers = [unsharded(parameters, job.tp, job.ep) for parameters in parameters_by_layer]
        layer_gradients = [
            unsharded(trained(parameters), job.tp, job.ep) for parameters in parameters_by_layer
        ]
        embed = unsharded(model.first, job.tp, job.ep) if is_first else 0
        head = unsharded(model.last, job.tp, job.ep) if is_last else 0
        embed_gradient = 0
        if embed_trained:
            embed_gradient = unsharded(embed_trained, job.tp, job.ep)
        head_gradient = 0
        if head_trained:
            head_gradient = unsharded(head_trained, job.tp, job.ep)
        if model.tied and is_first and is_last:
            head = 0
            head_gradient = 0

        trained_of_head = head_trained if head_gradient else ()
        self._set_shards(job, parameters_by_layer, embed_trained, trained_of_head)

        compute = job.compute_width
        first_layer = layers[0] if layers else 0
        last_layer = layers[-1] if layers else 0
        largest = max(layers, default=0)
        largest_gradient = max(layer_gradients, default=0)
        all_weights = (sum(layers) + embed + head) * compute
        if job.copies:
            # Each copy is freed in backward once its gradient is complete.
            self.most = all_weights
            self.end_of_forward = all_weights
            self.loss = all_weights
            self.backward_of_head = all_weights
            self.backward_of_last = all_weights - head * compute
            self.backward_of_layer = (embed + first_layer) * compute
            self.backward_of_embed = embed * compute
            return
        if not job.fsdp:
            self.most = 0
            self.end_of_forward = 0
            self.loss = 0
            self.backward_of_head = 0
            self.backward_of_last = 0
            self.backward_of_layer = 0
            self.backward_of_embed = 0
            return
        reduce = job.reduce_width
        if not job.frees_gathered:
            # Weights stay gathered until their backward, which also produces unreduced gradients.
            self.end_of_forward = all_weights
            self.loss = all_weights
            self.backward_of_head = all_weights
            self.backward_of_last = all_weights - head * compute + head_gradient * reduce
            self.backward_of_layer = (embed + first_layer) * compute + largest_gradient * reduce
            self.backward_of_embed = embed * compute + embed_gradient * reduce
            copies_of_last_layer = 1 if is_last else 2
            self.most = (
                sum(layers) + embed + 2 * head
            ) * compute + last_layer * compute * copies_of_last_layer
            return

        # Weights are freed after their forward, so at most two layers are gathered: the one in use and the
        # prefetched one.
        pair = 2 * largest if len(layers) > 1 else largest
        has_experts = any(model.layers[number].experts for number in job.stages[index])
        if has_experts and job.ep * job.cp * job.tp > 1:
            # Experts are their own unit, gathered next to the rest of the layer.
            pair = largest
        # A tied embedding and head belong to the root module, which stays gathered during the entire pass.
        root = embed if model.tied else 0
        keeps_last = job.reshard == "default"
        ranks = job.dp_shard * job.cp
        next_layer = largest if len(layers) > 1 else 0
        next_unit = max(head, next_layer)
        self.end_of_forward = (last_layer + next_unit + root) * compute
        at_loss = root
        if keeps_last:
            at_loss = last_layer + head + root
        self.loss = at_loss * compute
        self.backward_of_head = (head + pair + root) * compute
        self.backward_of_last = (pair + root) * compute + _reduced(head_gradient, ranks) * reduce
        self.backward_of_layer = (pair // 2 + root) * compute + _reduced(
            largest_gradient, ranks
        ) * reduce
        self.backward_of_embed = _reduced(embed_gradient, ranks) * reduce
        if job.tp > 1:
            self.backward_of_embed += embed_gradient * compute
        ends = embed + head + pair if model.tied else embed + largest
        self.most = max(
            head_gradient * reduce + pair * compute + largest // ranks * compute,
            largest_gradient * reduce + pair * compute,
            self.backward_of_embed,
            ends * compute,
        )

    def _set_shards(
        self,
        job: PlannedJob,
        parameters_by_layer: list[tuple[ParameterShape, ...]],
        embed_trained: Iterable[ParameterShape],
        head_trained: Iterable[ParameterShape],
    ) -> None:
        """Set the bytes of reduced gradients."""
        layer_shards = [
            _gradient_shards(trained(parameters), job) for parameters in parameters_by_layer
        ]
        self.layer_shard = layer_shards[0] if layer_shards else 0
        self.head_shard = _gradient_shards(head_trained, job)
        self.embed_shard = _gradient_shards(embed_trained, job)
        self.all_shards = self.head_shard + self.embed_shard + sum(layer_shards)


def _gradient_shards(parameters: Iterable[ParameterShape], job: PlannedJob) -> int:
    """Return the bytes of this rank's reduced gradients of some parameters."""
    return sum(sharded(parameter, job) for parameter in parameters) * job.gradient_bytes


def _reduced(gradient: int, ranks: int) -> int:
    """Return the elements of a gradient during its reduction: the unreduced one and the resulting shard."""
    return gradient + gradient // ranks

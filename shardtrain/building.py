"""How a run is put together for its first step."""

from __future__ import annotations

from shardtrain import data, init, models, optim, parallel
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.errors import ConfigError, Problem
from shardtrain.lora import lowbit
from shardtrain.lora import spec as adapters
from shardtrain.metrics.flops import count_model
from shardtrain.parallel import BATCH_AXES, world
from shardtrain.parallel.world import World
from shardtrain.run import Run
from shardtrain.state import TrainState


def build(config: Config, here: World) -> Run:
    """Everything for the first step: mesh, model on it with its initial weights, optimizer, data."""
    mesh = parallel.build(config, here)
    module = models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    model = models.build(module, shape)
    added = adapters.adapt(model, module, shape, config.lora)
    num_params, flops = count_model(model, module.LAYOUT, shape, config.training.seq_len)
    names = [name for name, _ in model.named_parameters()]
    own = [name for name in names if name not in added]
    draws = init.plan(own, module.initial(shape), module.LAYOUT, len(getattr(model, module.LAYOUT.layers))) | added
    lowbit.take_out(model, module.LAYOUT, config.lora.base_dtype)
    runner = parallel.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)
    runner.materialize(draws, config.debug.seed)
    optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, names)
    training = config.training
    scaler = None
    if derived.compute_dtype(config) == "float16":
        scaler = optim.LossScaler(training.initial_loss_scale, training.loss_scale_growth_interval)
    stream = data.open_stream(
        config,
        batch_rank=mesh.rank(*BATCH_AXES),
        num_batch_ranks=mesh.size(*BATCH_AXES),
        accumulation=derived.accumulation_steps(config, here.size),
    )
    if stream.vocab > shape.vocab_size:
        rule = f"names a tokenizer with {stream.vocab} ids, and the model has rows for {shape.vocab_size}"
        fix = "use the model's own tokenizer, or set model.overrides.vocab_size"
        raise ConfigError(Problem("model.hf_assets_path", config.model.hf_assets_path, rule, fix))
    if stream.masks_documents:
        models.check_documents(module, config.model.name)
    world.check_agreement(stream.fingerprint, "the training data differ between ranks", mesh.device)
    total_steps = training.steps
    if training.epochs is not None and stream.steps_left is not None:
        total_steps = stream.steps_left
    run = Run(config, mesh, runner, optimizer, scaler, stream, TrainState(), total_steps, num_params, flops)
    run.names = tuple(names)
    return run

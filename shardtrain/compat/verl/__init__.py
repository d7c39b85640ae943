"""Training engine for verl, which runs reinforcement learning (GRPO, PPO, DAPO) and SFT. See ``docs/verl.md``.

verl's configuration names the classes of this package, and importing it registers the engine "shardtrain".
"""

from __future__ import annotations

from shardtrain.compat.verl.engine_config import ActorConfig, CriticConfig, EngineConfig
from shardtrain.compat.verl.verl_engine import LanguageModelEngine, ValueModelEngine

__all__ = ["ActorConfig", "CriticConfig", "EngineConfig", "LanguageModelEngine", "ValueModelEngine"]

"""Where a run's wall time went, over all its attempts: written as it trains, added up by ``shardtrain goodput``."""

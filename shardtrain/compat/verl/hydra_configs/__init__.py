"""Files for verl's Hydra configuration. They select the engine for each role."""

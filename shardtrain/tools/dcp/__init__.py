"""Checkpoints of torch.distributed.checkpoint, such as torchtitan's: in and out, without running what is in them."""

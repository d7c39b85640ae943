"""Convert checkpoints from and to torch.distributed.checkpoint, as in torchtitan, without running code in them."""

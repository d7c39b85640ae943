"""The agent of a node monitors its ranks like the local launcher."""

from __future__ import annotations

from types import SimpleNamespace

from shardtrain.launch import agent, child_watch, nodes


def test_the_agent_polls_at_the_interval_used_to_count_stopped_ranks(tmp_path):
    """With PyTorch's default, twice this interval, a stopped rank would be killed after twice the documented time."""
    node = nodes.Nodes(2, 2, "127.0.0.1:1", 0, "run", "127.0.0.1", 0, 1, "--nnodes=2")
    rendezvous = SimpleNamespace(get_backend=lambda: "c10d", get_run_id=lambda: "run")
    node_agent = agent._agent(node, rendezvous, 1, ["doctor"], 0, str(tmp_path), None)
    assert node_agent.get_worker_group().spec.monitor_interval == child_watch.POLL_SECONDS

"""Queries of device capabilities, for the host, CUDA and a fake device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pretended_accelerator import NAME, in_a_fork, pretending

from shardtrain.metrics.peak_memory import DeviceMemory, read_peak
from shardtrain.metrics.profiling import profiling_problems
from shardtrain.ops import accelerator, device_kernels, document_mask, flash_attention

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """Fake CUDA device with compute capability 9.0."""
    here = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: here.capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    return here


def test_host_has_no_queue_and_needs_no_pinned_memory():
    assert not accelerator.is_accelerator("cpu")
    assert not accelerator.is_accelerator("meta")
    assert accelerator.collectives("cpu") == "gloo"
    assert accelerator.of_rank("cpu", 3) == CPU
    assert not accelerator.pins_memory(CPU)
    assert accelerator.name(CPU) == "cpu"

    tensor = torch.arange(3)
    assert accelerator.to_device(tensor, CPU) is tensor
    assert accelerator.read(tensor, "numbers") == [0, 1, 2]

    accelerator.finish(CPU)
    accelerator.finish_stream(CPU)
    assert accelerator.profiler_activity("cpu") is None


def test_backends_of_every_device_include_gloo_for_cpu_counts():
    assert accelerator.collectives("cuda") == "cpu:gloo,cuda:nccl"
    assert accelerator.collectives("xpu") == "cpu:gloo,xpu:xccl"


def test_accelerator_found_by_pytorch_is_used(monkeypatch):
    assert accelerator.device_type() == ""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert accelerator.device_type() == "xpu"
    assert accelerator.pins_memory()


@pytest.mark.parametrize(
    ("devices", "counted", "place"),
    [
        (8, True, 3),
        (8, False, 3),
        (1, False, 0),
        (1, True, 3),
    ],  # the last case is rejected before ranks start
)
def test_rank_that_sees_a_single_device_uses_it(devices, counted, place, monkeypatch):
    """``srun --gpus-per-task=1``, for example, shows one device per rank and does not set LOCAL_WORLD_SIZE."""
    chosen = []
    device_module = SimpleNamespace(device_count=lambda: devices, set_device=chosen.append)
    monkeypatch.setattr(accelerator, "module", lambda _: device_module)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if counted:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    device = accelerator.of_rank("cuda", 3)

    assert device == torch.device("cuda", place)
    assert chosen == [device]


@pytest.mark.parametrize(
    ("capability", "flash", "grouped", "bfloat16"),
    [
        ((7, 5), False, False, False),
        ((8, 0), True, False, True),
        ((9, 0), True, True, True),
        ((12, 0), True, False, True),
    ],
)
def test_kernels_depend_on_the_compute_capability(cuda, capability, flash, grouped, bfloat16):
    cuda.capability = capability
    assert device_kernels.has_flash_attention(CUDA) == flash
    assert device_kernels.has_grouped_matmul(CUDA, torch.bfloat16) == grouped
    assert not device_kernels.has_grouped_matmul(CUDA, torch.float32)
    assert device_kernels.has_bfloat16_units(CUDA) == bfloat16
    assert device_kernels.has_matmul_into_float32(CUDA)
    assert not device_kernels.has_matmul_into_float32(CPU)
    assert device_kernels.has_grouped_matmul(CPU, torch.float32)


@pytest.mark.parametrize(
    ("capability", "implementation", "first"),
    [
        ((8, 0), "FA2", "FLASH_ATTENTION"),
        ((9, 0), "FA2", "CUDNN_ATTENTION"),
        ((9, 0), "FA3", "FLASH_ATTENTION"),
    ],
)
def test_attention_prefers_the_fastest_kernel_and_restores_the_order(
    cuda, monkeypatch, capability, implementation, first
):
    cuda.capability, activated = capability, []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    before = torch._C._get_sdp_priority_order()
    with device_kernels.prefer_attention(CUDA, implementation):
        assert torch._C._get_sdp_priority_order()[0] == int(
            getattr(torch.nn.attention.SDPBackend, first)
        )

    assert torch._C._get_sdp_priority_order() == before
    assert activated == ([] if implementation == "FA2" else [implementation])

    with device_kernels.prefer_attention(CPU):
        assert torch._C._get_sdp_priority_order() == before


def answers_of_fake_device():
    """Return the properties of the fake device, and the operations for which the host waits."""
    answers = {}
    device = accelerator.of_rank(NAME, 0)
    answers["device"] = str(device)
    answers["pins"] = accelerator.pins_memory(device)
    answers["name"] = accelerator.name(device)
    answers["memory"] = accelerator.total_memory_bytes(device)
    answers["peak"] = read_peak(NAME)
    answers["device_type"] = accelerator.device_type()
    answers["history"] = accelerator.records_memory_history(device)
    with pretending() as mode:
        accelerator.finish(device)
        accelerator.finish_stream(device)
        answers["waits"] = [wait.why for wait in mode.waits]
        reading = accelerator.Reading(torch.ones(2, device=NAME), "two numbers")
        answers["requested"] = len(mode.waits)
        answers["numbers"] = reading.get()
        answers["read"] = mode.waits[-1].read
    return answers


def test_queries_work_on_any_kind_of_device():
    assert in_a_fork(answers_of_fake_device) == {
        "device": f"{NAME}:0",
        "pins": True,
        "name": "Pretended 80GB",
        "memory": 80 << 30,
        "peak": DeviceMemory(3.0, 4.0, 80.0, 0, 0),
        "device_type": NAME,
        "history": False,
        "waits": ["synchronize", "Stream.synchronize"],
        "requested": 2,
        "numbers": [0.0, 0.0],  # fake tensors have no data
        "read": "two numbers",
    }


def attention_of_grouped_heads():
    """Run grouped-query attention forward and backward, and fail if key heads are repeated. Return host waits."""

    def refused(*_):
        raise AssertionError("key heads were repeated")

    with pytest.MonkeyPatch.context() as patch, pretending() as mode:
        patch.setattr(flash_attention, "repeat_heads", refused)
        q, k, v = (
            torch.zeros(2, 16, heads, 8, dtype=torch.bfloat16, device=NAME) for heads in (8, 2, 2)
        )
        for causal in (True, False):
            out, lse = flash_attention.attend(q, k, v, causal)
            grads = flash_attention.attend_backward(out, q, k, v, out, lse, causal)
            assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
            assert out.shape == q.shape
            assert lse.shape == (2, 8, 16)
        return mode.waits


def test_split_attention_repeats_no_key_heads_on_an_accelerator():
    assert in_a_fork(attention_of_grouped_heads) == []


def test_host_copies_of_documents_are_found_for_row_slices(monkeypatch):
    # a pipeline slices the rows of each micro-batch from the document ids of a step
    host = torch.arange(12).reshape(4, 3)
    step_documents = torch.empty(4, 3, dtype=torch.int64, device="meta")
    document_mask.remember(step_documents, host)

    for start, stop in ((0, 2), (1, 4), (3, 4)):
        assert torch.equal(document_mask.on_host(step_documents[start:stop]), host[start:stop])
    # other views would be copied from the device, and the meta device has no data
    for view in (step_documents[:, 1:], step_documents[::2], step_documents[:1].expand(4, -1)):
        with pytest.raises(NotImplementedError):
            document_mask.on_host(view)


def test_memory_snapshot_is_rejected_without_an_allocator_history():
    from shardtrain.config.schema import Config, Profiling

    config = Config(profiling=Profiling(enable_memory_snapshot=True))
    assert not profiling_problems(config, "cuda")
    assert "xpu" in str(profiling_problems(config, "xpu")[0])

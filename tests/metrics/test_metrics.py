import json
import math
import re
import threading

import patience
import pytest
import torch

from shardtrain.metrics import Metrics
from shardtrain.metrics.flops import flops_per_token
from shardtrain.metrics.meters import MeterWindow
from shardtrain.utils.checked_json import record_of

KEYS = [
    "step",
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "tokens_seen",
    "tps",
    "tokens_per_second",
    "targets_per_second",
    "target_share",
    "tflops",
    "mfu",
    "memory_gib",
    "step_seconds",
    "data_seconds",
    "order_hash",
]


def records(folder, name="metrics.jsonl"):
    return [record_of(line) for line in (folder / name).read_bytes().splitlines()]


def test_first_step_every_log_freq_steps_and_last_step_are_logged(tmp_path, kit):
    kit.run(tmp_path, 12)
    assert [record["step"] for record in records(tmp_path)] == [1, 5, 10, 12]


def test_a_record_has_exactly_the_documented_keys(tmp_path, kit):
    kit.run(tmp_path, 1)
    (record,) = records(tmp_path)
    assert list(record) == KEYS


def test_speeds_times_and_counts_are_computed_from_steps_tokens_and_the_clock(tmp_path, kit):
    kit.run(tmp_path, 5, options={"peak_flops": 4e12}, world_size=2)
    record = records(tmp_path)[1]
    # 100 tokens per half second on 2 devices; 2e9 FLOPs per token. All numbers are exact in binary or nearly so.
    assert record["tokens_per_second"] == pytest.approx(200)
    assert record["tps"] == pytest.approx(100)
    assert record["tflops"] == pytest.approx(0.2)
    assert record["mfu"] == pytest.approx(0.05)
    assert record["step_seconds"] == pytest.approx(0.5)
    assert record["data_seconds"] == pytest.approx(0.125)
    assert record["tokens_seen"] == 500
    assert record["loss"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4)


def test_loss_is_the_mean_over_tokens_and_max_loss_the_worst_rank(tmp_path, kit):
    # Three ranks, uneven tokens, a window of two steps (steps 2 and 3); rank 2 has no tokens, as an earlier stage of
    # a pipeline. Step 1 is its own window and must not leak into the next.
    sums = {0: [5.0, 10.0, 2.0], 1: [7.0, 30.0, 60.0], 2: [0.0, 0.0, 0.0]}
    tokens = {0: [1, 10, 5], 1: [1, 20, 10], 2: [0, 0, 0]}
    ranks = kit.Ranks(3)
    logged = {}

    def play(rank):
        facts = kit.facts(rank=rank, world_size=3, is_writer=rank == 1, total_steps=3)
        metrics = Metrics(kit.config(log_freq=3), tmp_path, facts, ranks.of(rank))
        logged[rank] = []
        for step in range(3):
            loss_sum = torch.tensor(sums[rank][step])
            global_tokens = (2, 30, 15)[step]
            record = metrics.update(
                step + 1, loss_sum, tokens[rank][step], global_tokens, 1.0, 1e-3, 0.0
            )
            logged[rank].append(record)
        metrics.close()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience.seconds(20))

    assert set(logged) == {0, 1, 2}
    for first, middle, last in logged.values():
        assert (first.loss, first.max_loss) == (6.0, 7.0)
        assert middle is None
        # (10 + 2 + 30 + 60) / 45 tokens; rank 0 has 12/15, rank 1 has 90/30.
        assert last.loss == pytest.approx(102 / 45, rel=1e-12)
        assert last.max_loss == pytest.approx(3.0, rel=1e-12)
        assert last.tokens_seen == 47
    # Two collectives per rank on each of the two log steps, none between.
    assert ranks.calls == 3 * 2 * 2
    assert [record["step"] for record in records(tmp_path)] == [1, 3]


def test_steps_between_log_steps_do_not_wait_for_the_device(kit):
    # Reading a meta tensor raises, so this test detects any wait for the device.
    window = MeterWindow(kit.Clock())
    for _ in range(3):
        window.add(torch.zeros((), device="meta"), 1, 1, 0.0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        window.read(kit.OneRank())


def test_a_window_sums_in_double_precision(kit):
    # 2**24 + 1 does not exist in float32.
    window = MeterWindow(kit.Clock())
    for value in (2.0**24, 1.0):
        window.add(torch.tensor(value), 1, 1, 0.0)
    assert window.read(kit.OneRank()).loss * 2 == 2**24 + 1


def test_a_window_does_not_keep_the_graph(kit):
    loss = torch.ones((), requires_grad=True) * 2
    window = MeterWindow(kit.Clock())
    window.add(loss, 1, 1, 0.0)
    assert not window._sums.loss.requires_grad


def test_a_window_without_steps_cannot_be_read(kit):
    with pytest.raises(ValueError, match="without steps"):
        MeterWindow(kit.Clock()).read(kit.OneRank())


def test_a_window_without_tokens_has_no_loss_and_does_not_fail(kit):
    window = MeterWindow(kit.Clock())
    window.add(torch.zeros(()), 0, 0, 0.0)
    means = window.read(kit.OneRank())

    assert math.isnan(means.loss)
    assert math.isnan(means.max_loss)
    assert means.tokens_per_second == 0


def test_steps_without_targets_are_named_and_counted(tmp_path, kit, caplog):
    with (
        caplog.at_level("INFO"),
        Metrics(kit.config(log_freq=1), tmp_path, kit.facts(), kit.OneRank()) as metrics,
    ):
        for step, tokens in enumerate((0, 100, 0, 100), start=1):
            metrics.update(step, torch.tensor(float(tokens)), tokens, tokens, 0.25, 1e-3, 0.125)

    assert [line["loss"] for line in records(tmp_path)] == [None, 1.0, None, 1.0]
    assert [line["steps_without_targets"] for line in records(tmp_path)] == [1, 1, 2, 2]
    assert caplog.text.count("loss: no targets") == 2
    assert caplog.text.count("loss:  1.00000") == 2
    assert "loss 1.0000 -> 1.0000" in caplog.text
    assert "nan" not in caplog.text


def test_paused_time_is_not_step_time(tmp_path, kit):
    clock = kit.Clock()
    metrics = Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank(), clock=clock)
    with metrics.pause():
        clock.now += 1000
    clock.now += 2

    assert metrics.update(1, torch.tensor(1.0), 1, 1, 1.0, 1.0, 0.0).step_seconds == pytest.approx(
        2
    )

    metrics.close()


def test_numbers_that_are_not_finite_are_null_in_valid_json(tmp_path, kit):
    nan_loss = torch.tensor(float("nan"))
    infinite_norm = float("inf")
    metrics_of_the_task = {"ratio": float("-inf"), "n": 3}
    with Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        metrics.update(1, nan_loss, 1, 1, infinite_norm, 1.0, 0.0, metrics_of_the_task)
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(text, parse_constant=refuse)

    assert record["loss"] is None
    assert record["grad_norm"] is None
    assert record["ratio"] is None
    assert record["n"] == 3


def test_unknown_device_has_no_mfu_and_reports_it(tmp_path, kit, caplog):
    with caplog.at_level("INFO", logger="shardtrain"):
        kit.run(tmp_path, 1)
    assert records(tmp_path)[0]["mfu"] is None
    assert "the bfloat16 peak of AMD EPYC is unknown" in caplog.text
    assert "metrics.peak_flops" in caplog.text


def test_a_known_device_has_its_mfu_from_the_table(tmp_path, kit):
    kit.run(tmp_path, 1, device_name="NVIDIA H200", flops_per_token=989.4e12 / 400)
    assert records(tmp_path)[0]["mfu"] == pytest.approx(0.5)


def test_extra_metric_with_the_name_of_a_standard_one_is_rejected(tmp_path, kit, caplog):
    metrics = Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank())
    for step in (1, 2):
        metrics.update(step, torch.tensor(1.0), 1, 1, 1.0, 1.0, 0.0, {"lr": 2.0})
    metrics.close()

    assert caplog.text.count("the metric sink JsonlFiles failed") == 1
    assert "extra metrics must not have names of standard metrics: ['lr']" in caplog.text


def test_only_the_writer_writes_files(tmp_path, kit):
    kit.run(tmp_path, 5, is_writer=False, options={"enable_tensorboard": True})
    assert not list(tmp_path.iterdir())


NUMBER = r"\s*-?[\d.,]+(e[+-]\d+)?"


@pytest.mark.parametrize("mfu", [True, False])
def test_console_line_has_the_usual_names(tmp_path, kit, caplog, mfu):
    with caplog.at_level("INFO", logger="shardtrain"):
        kit.run(tmp_path, 1, options={"peak_flops": 1e12} if mfu else {})
    (line,) = [message for message in caplog.messages if message.startswith("step:")]
    names = ["step:", "loss:", "grad_norm:", "lr:"]
    pattern = "  ".join(name + NUMBER for name in names)
    pattern += rf"  memory:{NUMBER} GiB  tps:{NUMBER}  tflops:{NUMBER}"
    pattern += r"  mfu: [\d.]+%" if mfu else "  mfu: -"
    pattern += rf"  data:{NUMBER}s  left: \S+"

    assert re.fullmatch(pattern, line), line
    assert line.startswith("step:  1  loss:  1.00000  grad_norm:  0.2500")


def test_the_coloured_line_is_the_plain_line_with_colours(tmp_path, kit, caplog):
    with caplog.at_level("INFO", logger="shardtrain"):
        kit.run(tmp_path, 1)
    (record,) = [r for r in caplog.records if r.message.startswith("step:")]
    assert "\x1b[" in record.colored
    assert re.sub(r"\x1b\[\d+m", "", record.colored) == record.message
    assert "\x1b" not in record.message


def test_summary_contains_steps_losses_tokens_speed_and_files(tmp_path, kit, caplog):
    with caplog.at_level("INFO", logger="shardtrain"):
        kit.run(tmp_path, 4, total_steps=4)

    summary = "done: 4 steps (to step 4) in 2s, loss 1.0000 -> 0.3611, 400 tokens, 200 tokens/s"
    assert summary in caplog.text
    assert str(tmp_path / "metrics.jsonl") in caplog.text


def test_finished_run_reports_it_and_the_option_to_increase(tmp_path, kit, caplog):
    with caplog.at_level("INFO", logger="shardtrain"):
        kit.run(tmp_path, 4, start_step=4, total_steps=4)
    assert "finished at step 4" in caplog.text
    assert "steps 5 to 4" not in caplog.text
    assert (
        "the run had already finished at step 4: to continue, increase training.steps"
        in caplog.text
    )


def test_a_failed_run_has_no_summary(tmp_path, kit, caplog):
    with caplog.at_level("INFO", logger="shardtrain"), pytest.raises(KeyError):  # noqa: SIM117
        with Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank()):
            raise KeyError("stop")
    assert "done:" not in caplog.text


def test_resumed_run_continues_the_token_count(tmp_path, kit):
    kit.run(tmp_path, 10)
    kit.run(tmp_path, 12, start_step=10)
    assert [(r["step"], r["tokens_seen"]) for r in records(tmp_path)] == [
        (1, 100),
        (5, 500),
        (10, 1000),
        (12, 1200),
    ]


def test_a_resumed_run_counts_from_the_tokens_of_its_checkpoint(tmp_path, kit):
    metrics = Metrics(kit.config(), tmp_path, kit.facts(start_step=4), kit.OneRank(), 4000)
    assert metrics.update(5, torch.tensor(1.0), 10, 10, 1.0, 1.0, 0.0).tokens_seen == 4010
    metrics.close()


def test_validation_has_its_own_file(tmp_path, kit, caplog):
    caplog.set_level("INFO", logger="shardtrain")
    with Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        metrics.validation(7, {"loss": 2.5})
    assert records(tmp_path, "validation.jsonl") == [{"step": 7, "loss": 2.5}]
    assert "validation step:  7  loss: 2.50000" in caplog.text


def test_flops_of_llama_2_7b():
    # 6.74e9 parameters less the 32000 x 4096 embedding; 6 N + 12 L H head_dim T by hand.
    count = flops_per_token(
        6_738_415_616 - 32000 * 4096, num_layers=32, num_heads=32, head_dim=128, seq_len=2048
    )
    assert count == 39_644_061_696 + 3_221_225_472


def test_speeds_count_computed_tokens_and_targets_separately(tmp_path, kit):
    """A long prompt with one target takes as much time as the same text with a target for each token."""
    clock = kit.Clock()
    facts = kit.facts(total_steps=1, world_size=2)
    with Metrics(
        kit.config(), tmp_path, facts, kit.OneRank(), tokens_seen=0, clock=clock
    ) as metrics:
        clock.now += 0.5
        metrics.update(1, torch.tensor(8.0), 8, 8, 1.0, 1.0, 0.0, computed_tokens=250)
    (record,) = records(tmp_path)

    assert record["targets_per_second"] / record["tokens_per_second"] == pytest.approx(8 / 250)
    assert record["target_share"] == pytest.approx(8 / 250)
    assert record["tps"] == pytest.approx(record["tokens_per_second"] / 2)
    assert record["tokens_seen"] == 8

"""The choice of a strategy for a layer over several devices, and what `explain` says of it."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.peers.expert_parallel import WAYS
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.expert_parallel.options import Wanted
from jax_grouped_gemm._src.expert_parallel.prediction import Shape, choose, predict

QWEN = 8192, 2048, 768, 128, 8
DSV3 = 4096, 7168, 2048, 64, 8
MIXTRAL = 4096, 4096, 14336, 8, 2


class TestChoice:
    @pytest.mark.parametrize("layer", [QWEN, DSV3, MIXTRAL])
    def test_two_devices_gather(self, layer):
        """A gather from one other device never sends more than an exchange would."""
        assert choose(Shape(*layer, 2)).strategy == "all_gather"

    @pytest.mark.parametrize("devices", [2, 4, 8])
    @pytest.mark.parametrize("layer", [QWEN, DSV3])
    def test_as_many_choices_as_devices_gather(self, layer, devices):
        assert choose(Shape(*layer, devices)).strategy == "all_gather"

    def test_few_choices_on_many_devices_are_exchanged(self):
        tokens, embed, hidden, _, _ = MIXTRAL
        shape = Shape(tokens, embed, hidden, 64, 1, 32)
        assert choose(shape).strategy == "ragged_all_to_all"
        assert choose(shape, can_exchange=False).strategy == "all_gather"

    @pytest.mark.parametrize("layer", [QWEN, DSV3, MIXTRAL])
    def test_none_of_the_other_ways_is_faster(self, layer):
        shape = Shape(*layer, 4)
        best = choose(shape).step_seconds
        for strategy in ("all_gather", "ragged_all_to_all"):
            for chunks in (1, 2, 4):
                assert predict(shape, strategy, chunks).step_seconds >= best

    def test_rows_that_are_not_there_cost_nothing(self):
        dropless = predict(Shape(*QWEN, 4), "all_gather").forward_seconds
        assert predict(Shape(*QWEN, 4), "all_gather", buffer_factor=1).forward_seconds == dropless

    @pytest.mark.parametrize("layer", [QWEN, DSV3, MIXTRAL])
    def test_gradients_beside_products_are_faster(self, layer):
        shape = Shape(*layer, 2)
        overlapped, apart = (
            choose(shape, Wanted(overlap=overlap), copy_engines=True) for overlap in (True, False)
        )
        assert overlapped.forward_seconds == apart.forward_seconds
        assert overlapped.step_seconds < apart.step_seconds

    @pytest.mark.parametrize("layer", [QWEN, DSV3, MIXTRAL])
    def test_copy_engines_are_faster_and_change_no_choice(self, layer):
        ways = [choose(Shape(*layer, 2), copy_engines=engines) for engines in (False, True)]
        kernels, engines = ways
        assert engines.forward_seconds < kernels.forward_seconds
        names = "strategy", "chunks", "combine", "overlap", "save"
        assert all(getattr(engines, name) == getattr(kernels, name) for name in names)
        assert engines.copy_engines and not kernels.copy_engines

    def test_copy_engines_send_ppermutes_alone(self):
        shape, wanted = Shape(*QWEN, 2), Wanted(combine="all_to_all")
        assert choose(shape, wanted, copy_engines=True) == choose(shape, wanted)

    @pytest.mark.parametrize(
        ("devices", "wanted", "combine", "overlap"),
        [
            (2, Wanted(), "ppermute", True),
            (2, Wanted(overlap=False), "ppermute", False),
            (2, Wanted(chunks=2), "ppermute", False),
            (2, Wanted(combine="all_to_all"), "all_to_all", False),
            (4, Wanted(), "all_to_all", False),
            (4, Wanted(overlap=True), "ppermute", True),
        ],
    )
    def test_what_sends(self, devices, wanted, combine, overlap):
        chosen = choose(Shape(*QWEN, devices), wanted)
        assert (chosen.combine, chosen.overlap) == (combine, overlap)

    @pytest.mark.parametrize(
        ("layer", "devices", "wanted", "save"),
        [
            (QWEN, 2, Wanted(), "rows"),  # narrow experts: copying rows again takes much of a step
            (DSV3, 2, Wanted(), "rows"),
            (MIXTRAL, 2, Wanted(), "x"),
            (QWEN, 2, Wanted(save="x"), "x"),
            (QWEN, 2, Wanted(chunks=2), "x"),  # chunks ask for less memory
            (QWEN, 4, Wanted(), "x"),  # buffers hold four times the balanced rows
            (QWEN, 4, Wanted(buffer_factor=1.25), "rows"),
            ((8192, 2048, 256, 128, 8), 2, Wanted(), "x"),  # kernels read tokens in place
        ],
    )
    def test_what_is_kept(self, layer, devices, wanted, save):
        chosen = choose(Shape(*layer, devices), wanted)
        assert chosen.save == save
        unkept = choose(Shape(*layer, devices), wanted, can_keep_rows=False)
        assert unkept.save == "x" and unkept.step_seconds >= chosen.step_seconds

    def test_what_is_asked_for_is_kept(self):
        shape = Shape(*QWEN, 8)
        chosen = choose(shape, Wanted("ragged_all_to_all", 2, "ppermute", save="nothing"))
        assert (chosen.strategy, chosen.chunks) == ("ragged_all_to_all", 2)
        assert (chosen.combine, chosen.save) == ("ppermute", "nothing")

    def test_one_device_moves_nothing(self):
        chosen = choose(Shape(*QWEN, 1))
        assert (chosen.strategy, chosen.chunks) == ("all_gather", 1)
        assert chosen.sent_bytes == 0
        assert chosen.forward_fraction == chosen.step_fraction == 1


class TestBytes:
    def test_gathered_tokens(self):
        one = predict(Shape(*QWEN, 4), "all_gather")
        assert one.sent_bytes == 3 * 8192 * 2048 * 2

    def test_exchanged_rows(self):
        """A token has k rows, and a row travels if its expert is on another device."""
        one = predict(Shape(*QWEN, 4), "ragged_all_to_all")
        assert one.sent_bytes == 8192 * 8 * 2048 * 2 * 3 // 4

    @pytest.mark.parametrize("strategy", ["all_gather", "ragged_all_to_all"])
    def test_buffers(self, strategy):
        """Buffers hold all rows, the rows of a chunk, or as many as `buffer_factor` asks for."""
        shape = Shape(*QWEN, 4)
        everything = 4 * 8192 * 8 * 2048 * 2
        assert predict(shape, strategy).buffer_bytes == everything
        assert predict(shape, strategy, 4).buffer_bytes == everything // 4
        assert predict(shape, strategy, buffer_factor=1.25).buffer_bytes == 1.25 * everything / 4

    def test_no_more_than_all_experts_of_a_device(self):
        """A device has two experts, so a token has at most two rows there, whatever k is."""
        one = predict(Shape(*MIXTRAL[:3], 8, 4, 4), "all_gather")
        assert one.buffer_bytes == 4 * 4096 * 2 * 4096 * 2


class TestExplanation:
    def test_says_what_is_chosen(self):
        text = str(moe.explain_expert_parallel(*QWEN, 2))
        assert "strategy all_gather, chunks 1, combine ppermute" in text
        assert "overlap True, save rows" in text
        assert "kernels send, copy engines with moe.expert_parallel_compiler_options()" in text
        assert "33.6 MB leave a device" in text
        assert "instead of ragged_all_to_all" in text
        assert "of no communication" in text

    def test_says_who_sends(self):
        text = str(moe.explain_expert_parallel(*QWEN, 2, copy_engines=True))
        assert "copy engines send\n" in text and "compiler_options" not in text

    def test_tensor_devices_and_dtype(self):
        half = moe.explain_expert_parallel(*MIXTRAL, 4, tensor_devices=2, dtype=jnp.float32)
        assert half.shape.hidden == 7168 and half.shape.itemsize == 4
        assert half.chosen.forward_seconds > 0

    def test_mistakes(self):
        with pytest.raises(ValueError, match="devices must divide num_experts = 128.*got 3"):
            moe.explain_expert_parallel(*QWEN, 3)
        with pytest.raises(ValueError, match="tokens must be positive, got 0"):
            moe.explain_expert_parallel(0, *QWEN[1:], 2)
        with pytest.raises(TypeError, match="devices must be an integer"):
            moe.explain_expert_parallel(*QWEN, 2.0)
        with pytest.raises(ValueError, match="strategy.*got 'ring'"):
            moe.explain_expert_parallel(*QWEN, 2, strategy="ring")
        with pytest.raises(TypeError, match="overlap must be True or False, got 'yes'"):
            moe.explain_expert_parallel(*QWEN, 2, overlap="yes")
        with pytest.raises(ValueError, match="save.*got 'y'"):
            moe.explain_expert_parallel(*QWEN, 2, save="y")
        divisor = f"divisor of the {QWEN[0]} tokens of a device, got 3"
        with pytest.raises(ValueError, match=divisor):
            moe.explain_expert_parallel(*QWEN, 2, chunks=3)


RECORD = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/h100_x2_choices.json").read_text()
)


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: case["case"])
def test_what_it_chooses_is_within_3_percent_of_the_fastest_way(case):
    layer = [case["shape"][name] for name in ("tokens", "embed", "hidden", "experts", "top_k")]
    chosen = choose(Shape(*layer, case["devices"]))
    names = "strategy", "combine", "overlap", "save"
    (name,) = (
        name
        for name, way in WAYS.items()
        if all(getattr(chosen, option) == way[option] for option in names if option in way)
    )
    medians = {way: case["peers"][way]["median_us"] for way in WAYS}
    assert medians[name] <= 1.03 * min(medians.values())

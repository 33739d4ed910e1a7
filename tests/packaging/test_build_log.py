"""The build keeps the compiler's messages about each kernel with the extension."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

extension = pytest.importorskip("jax_grouped_gemm._extension")
LOGS = sorted((Path(extension.__file__).parent / "_build").glob("*.cu.log"))
EVERY_LOG = pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)


@EVERY_LOG
def test_kernels_keep_their_accumulators_in_registers(log):
    text = log.read_text()
    assert "for 'sm_90a'" in text
    assert set(re.findall(r"(\d+) bytes spill", text)) == {"0"}


@EVERY_LOG
def test_wgmma_stays_asynchronous_and_registers_move(log):
    # C7510 and its neighbours: WGMMA instructions are serialised. C7508: setmaxnreg is ignored.
    assert not re.search(r"C75\d\d|wgmma.*serialized|setmaxnreg.*ignored", log.read_text())


def test_additions_of_fp8_products_are_paced():
    # The build fails where it finds none. What is paced: forward products, those whose last wave is
    # cut, those that read tokens in place, and weight gradients, with scales of both operands, of
    # one, or of one in two results, for three pairs of formats each: three kernels of 128 additions
    # at least.
    if not any(log.name.startswith("scaled_") for log in LOGS):
        pytest.skip("built without FP8 kernels: JGG_TYPES")
    found = r"Additions paced: (\d+) instructions, (\d+) of one bank"
    paced = [tuple(map(int, match)) for log in LOGS for match in re.findall(found, log.read_text())]
    assert len(paced) == 6 and min(count for count, _ in paced) >= 3 * 128
    assert not any(of_one_bank for _, of_one_bank in paced)

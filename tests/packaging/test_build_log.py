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
    # ptxas reports serialised WGMMA instructions (C7510 and others) and ignored setmaxnreg (C7508).
    assert not re.search(r"C75\d\d|wgmma.*serialized|setmaxnreg.*ignored", log.read_text())


def test_additions_of_fp8_products_are_paced():
    # The build fails if it finds no additions in a source whose additions it paces. There are six
    # such sources. Three are for forward products: plain, with a cut last wave, and reading tokens
    # in place. Three are for weight gradients: with scales of both operands, with scales of one,
    # and with scales of one and two results. Each source has a kernel of at least 128 additions for
    # each of three pairs of formats.
    if not any(log.name.startswith("scaled_") for log in LOGS):
        pytest.skip("built without FP8 kernels: JGG_TYPES")
    found = r"Additions paced: (\d+) instructions, (\d+) of one bank"
    paced = [tuple(map(int, match)) for log in LOGS for match in re.findall(found, log.read_text())]
    assert len(paced) == 6 and min(count for count, _ in paced) >= 3 * 128
    assert not any(of_one_bank for _, of_one_bank in paced)

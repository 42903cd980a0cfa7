"""QSGD's entropy coder in readable Python: lossless Elias omega codes for the codes of a block.

Sources: P. Elias, Universal codeword sets and representations of the integers, IEEE Trans. Inf. Theory 21(2), 1975;
D. Alistarh et al., QSGD, NIPS 2017, arXiv 1610.02132, which describes the code of sparse vectors. The paper only cites
the code of dense vectors. Elias(|l| + 1) is our choice, and meets the paper's bound of 2.8 bits per coordinate at
s = sqrt(d).

A code c is an integer 0 to K-1, K odd, and stands for level l = c - K//2. Let Elias(k) be the omega code of k >= 1. A
sign bit is 1 for l < 0. The record of a block of n coordinates is the shortest of these forms. It is "sparse" if the
sparse and the dense form are equally short:

    void     11                                                                     all codes are 0, not all levels
    sparse   0   Elias(non-zeros + 1), then per non-zero: Elias(gap), sign bit, Elias(|l|)
    dense    10  per coordinate: Elias(|l| + 1), then for a non-zero: sign bit

A gap counts from the previous non-zero. The first gap counts from position -1. Blocks whose scale is zero or not finite
have codes 0 in a message. The void form exists for them, because code 0 is the lowest level, which has the longest
omega code.

`reducers.elias.writer` and `reducers.elias.reader` have the fast form, for whole messages.
"""

from __future__ import annotations

from collections.abc import Sequence


def omega_code(k: int) -> str:
    """Returns the Elias omega code of ``k`` >= 1 as a string of 0 and 1.

    The last digit is 0. It is preceded by k in binary. Each binary number is preceded by its number of digits minus
    one, in binary, down to 1, which is not written.

    Raises:
        ValueError: if ``k`` < 1, which has no code.
    """
    if k < 1:
        raise ValueError(f"the Elias omega code has integers from 1 on, not {k}")
    code = "0"
    while k > 1:
        binary = f"{k:b}"
        code = binary + code
        k = len(binary) - 1
    return code


def reference_block_bits(codes: Sequence[int], levels: int) -> str:
    """Returns the record of one block as a string of 0 and 1.

    Args:
        codes: codes 0 to ``levels`` - 1.
        levels: number of levels K, odd.
    """
    if not any(codes):
        return "11"
    signed = [int(code) - levels // 2 for code in codes]
    positions = [j for j, level in enumerate(signed) if level]
    sparse = ["0", omega_code(len(positions) + 1)]
    for before, j in zip([-1, *positions], positions, strict=False):
        sparse += [omega_code(j - before), sign_bit(signed[j]), omega_code(abs(signed[j]))]
    dense = ["10"] + [omega_code(abs(level) + 1) + sign_bit(level) for level in signed]
    return min("".join(sparse), "".join(dense), key=len)


def sign_bit(level: int) -> str:
    """Returns the sign bit of a level as a string; empty for level 0."""
    return {-1: "1", 0: "", 1: "0"}[(level > 0) - (level < 0)]

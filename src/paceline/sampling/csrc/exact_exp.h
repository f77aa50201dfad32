// exp(x) of x <= 0: plain IEEE operations in a fixed order, so that no compiler and no machine changes a bit. Operation
// for operation what distribution.py's _weights does.
//
// The sampler and the CUDA kernels include it, and NVRTC has no standard headers: whoever includes it defines EXACT, which
// stands before a function, as_bits of a float and of a double, and as_float.
#pragma once

// exp(x) * 2^scale of x in -30..0, to 2e-7 of itself.
EXACT float scaled_exp(float x, unsigned int scale) {
    const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    return as_float(as_bits(p) + ((as_bits(shifted) - 0x4B400000u + scale) << 23));  // p * 2^(n + scale)
}

// exp(x) in units of 2^-34, a whole number: sums are exact, whatever their order.
EXACT unsigned long long exp_units(float x) {
    return as_bits((double)scaled_exp(x, 34) + 6755399441055744.0) - 0x4338000000000000ull;  // in the last bits of 1.5 * 2^52
}

// Codec throughput and distortion, one thread: OMP_NUM_THREADS=1 bench_codec [codec ..]
//
// GB/s are of float32 input or output, medians of several runs on 16 MiB of Gaussian values; "copy" is the share of memcpy's
// rate over the same buffer. Time is the process's, so that a busy machine does not count. A decode-reduce takes 3 peers' wires
// and the own float32 values.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <vector>

#include "llmc/cpu/codec.h"

template <class Work>
static double median_gb_per_s(size_t n, Work work) {
    double rate[9];
    work();
    for (double& r : rate) {
        const std::clock_t start = std::clock();
        work();
        r = 4e-9 * double(n) * CLOCKS_PER_SEC / double(std::clock() - start);
    }
    std::nth_element(rate, rate + 4, rate + 9);
    return rate[4];
}

int main(int argc, char** argv) try {
    const size_t n = 4 << 20;
    std::vector<std::string> specs(argv + 1, argv + argc);
    if (specs.empty())
        specs = {"none",    "bf16",    "fp8",     "int8",    "taco",    "taco:fmt=e5m2", "hadint8",
                 "hadint7", "hadint6", "hadint5", "hadint4", "taco:sr", "hadint8:sr"};
    std::vector<float> x(n), out(n);
    for (size_t i = 0; i < n; i += 4) {
        const auto four = normals_from_bits(philox(1, i, 0));
        std::copy(four.begin(), four.end(), x.begin() + long(i));
    }
    const double copy = median_gb_per_s(n, [&] { memcpy(out.data(), x.data(), 4 * n); });
    std::printf("memcpy %.1f GB/s\n\n", copy);
    std::printf("%-14s %6s | %8s %5s | %8s %5s | %13s | %20s | %6s\n", "codec", "bytes", "encode", "copy", "decode", "copy",
                "decode-reduce", "decode-reduce-encode", "SNR dB");
    for (const std::string& spec : specs) {
        const Codec c = codec_parse(spec);
        const size_t bytes = codec_bytes(c, n);
        std::vector<uint8_t> wire(bytes), wires(3 * bytes);
        const uint8_t* peers[4] = {nullptr, &wires[0], &wires[bytes], &wires[2 * bytes]};
        for (uint32_t peer = 0; peer < 3; peer++)
            cpu::codec_encode(c, &wires[peer * bytes], x.data(), n, {.rank = peer}, nullptr, {});

        const double encode = median_gb_per_s(n, [&] { cpu::codec_encode(c, wire.data(), x.data(), n, {}, nullptr, {}); });
        const double decode = median_gb_per_s(n, [&] { cpu::codec_decode(c, out.data(), wire.data(), n, {}); });
        double signal = 0, noise = 0;
        for (size_t i = 0; i < n; i++) signal += double(x[i]) * x[i], noise += (double(x[i]) - out[i]) * (double(x[i]) - out[i]);
        const double reduce = median_gb_per_s(n, [&] { cpu::codec_decode_reduce(c, out.data(), peers, x.data(), 4, n, {}); });
        const double reduce_encode =
            median_gb_per_s(n, [&] { cpu::codec_decode_reduce_encode(c, wire.data(), peers, x.data(), 4, n, {}, nullptr, {}); });
        std::printf("%-14s %6.4f | %8.2f %4.0f%% | %8.2f %4.0f%% | %13.2f | %20.2f | %6.1f\n", spec.c_str(),
                    double(bytes) / double(n), encode, 100 * encode / copy, decode, 100 * decode / copy, reduce, reduce_encode,
                    10 * std::log10(signal / noise));
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "bench_codec: %s\n", error.what());
    return 1;
}

// The ops of this target: `op::` is cpu:: or cuda::, same names and signatures (llmc/cpu/*.h, llmc/cuda/*.cuh).
#pragma once
#ifdef LLMC_CUDA
#include "llmc/cuda/attention.cuh"
#include "llmc/cuda/bias.cuh"
#include "llmc/cuda/cast.cuh"
#include "llmc/cuda/classifier.cuh"
#include "llmc/cuda/codec.cuh"
#include "llmc/cuda/codec_norm.cuh"
#include "llmc/cuda/embedding.cuh"
#include "llmc/cuda/gelu.cuh"
#include "llmc/cuda/layernorm.cuh"
#include "llmc/cuda/matmul.cuh"
#include "llmc/cuda/optimizer.cuh"
namespace op = cuda;
#else
#include "llmc/cpu/attention.h"
#include "llmc/cpu/cast.h"
#include "llmc/cpu/classifier.h"
#include "llmc/cpu/codec.h"
#include "llmc/cpu/codec_norm.h"
#include "llmc/cpu/embedding.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/optimizer.h"
namespace op = cpu;
#endif

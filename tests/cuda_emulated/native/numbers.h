// cuBLAS and NCCL name these two only behind pointers; CUDA's own headers for them need more than torch brings.
#pragma once
struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };

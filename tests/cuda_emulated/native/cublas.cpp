// cuBLAS: no product is computed here, but combinations of types and sizes that cuBLAS refuses are refused.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstdlib>
#include <cstring>

namespace {

void* handle() { return calloc(1, 1024); }

bool combines(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute) {
  if (a != b) return false;
  const bool half = a == CUDA_R_16F || a == CUDA_R_16BF;
  switch (compute) {
    case CUBLAS_COMPUTE_16F: return a == CUDA_R_16F && c == a;
    case CUBLAS_COMPUTE_32I: return a == CUDA_R_8I && c == CUDA_R_32I;
    case CUBLAS_COMPUTE_64F: return a == CUDA_R_64F && c == a;
    default: return (half && (c == a || c == CUDA_R_32F)) || (a == CUDA_R_32F && c == a);
  }
}

struct Matrix {
  cublasOperation_t operation;
  int rows, columns, stride;

  bool fits() const { return rows >= 0 && columns >= 0 && stride >= (operation == CUBLAS_OP_N ? rows : columns); }
};

cublasStatus_t judge(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute, Matrix left,
                     Matrix right, Matrix result) {
  if (!combines(a, b, c, compute)) return CUBLAS_STATUS_NOT_SUPPORTED;
  return left.fits() && right.fits() && result.fits() ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* out) {
  *out = static_cast<cublasHandle_t>(handle());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* out) {
  *out = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* out) {
  *out = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                            const void*, const void*, cudaDataType a, int lda, const void*, cudaDataType b, int ldb,
                            const void*, void*, cudaDataType c, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t) {
  return judge(a, b, c, compute, {ta, m, k, lda}, {tb, k, n, ldb}, {CUBLAS_OP_N, m, n, ldc});
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                                          int k, const void*, const void*, cudaDataType a, int lda, long long,
                                          const void*, cudaDataType b, int ldb, long long, const void*, void*,
                                          cudaDataType c, int ldc, long long, int, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
  return judge(a, b, c, compute, {ta, m, k, lda}, {tb, k, n, ldb}, {CUBLAS_OP_N, m, n, ldc});
}

size_t cublasLtGetVersion() { return 130100; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t, cudaDataType_t) {
  *out = static_cast<cublasLtMatmulDesc_t>(handle());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  free(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType, uint64_t, uint64_t, int64_t) {
  *out = static_cast<cublasLtMatrixLayout_t>(handle());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  free(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  *out = static_cast<cublasLtMatmulPreference_t>(handle());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  free(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int asked,
                                              cublasLtMatmulHeuristicResult_t* out, int* found) {
  memset(out, 0, asked * sizeof *out);
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"

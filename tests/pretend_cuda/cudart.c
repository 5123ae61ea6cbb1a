/* The CUDA runtime as PyTorch calls it, with devices made of host memory. No kernel can be launched: device.py computes.

   Loaded before libcudart (LD_PRELOAD). Functions that are not here answer as on a machine without a driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda_runtime_api.h>

#define DONE return cudaSuccess
#define NOTHING(name, ...) cudaError_t name(__VA_ARGS__) { DONE; }

typedef struct block { size_t size; int on_host; struct block *next; char *start; } block;
static block *blocks;
static size_t used;
static size_t peak_of(void) { const char *gb = getenv("PRETEND_BYTES"); return gb ? strtoull(gb, 0, 10) : 80ull << 30; }
static __thread int current;
static int lock;
static void enter(void) { while (__sync_lock_test_and_set(&lock, 1)); }
static void leave(void) { __sync_lock_release(&lock); }

static cudaError_t get(void **at, size_t size, int on_host) {
  if (!on_host && used + size > peak_of()) return cudaErrorMemoryAllocation;
  block *b = malloc(sizeof *b);
  if (posix_memalign((void **)&b->start, 512, size ? size : 512)) return cudaErrorMemoryAllocation;
  b->size = size, b->on_host = on_host;
  enter(); b->next = blocks; blocks = b; if (!on_host) used += size; leave();
  *at = b->start;
  DONE;
}
static cudaError_t drop(void *at) {
  enter();
  for (block **p = &blocks; *p; p = &(*p)->next)
    if ((*p)->start == at) { block *b = *p; *p = b->next; if (!b->on_host) used -= b->size; free(at); free(b); break; }
  leave();
  DONE;
}
cudaError_t cudaMalloc(void **at, size_t size) { return get(at, size, 0); }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) { return get(at, size, 1); }
cudaError_t cudaMallocHost(void **at, size_t size) { return get(at, size, 1); }
cudaError_t cudaFree(void *at) { return drop(at); }
cudaError_t cudaFreeHost(void *at) { return drop(at); }
NOTHING(cudaHostRegister, void *at, size_t size, unsigned flags)
NOTHING(cudaHostUnregister, void *at)
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *all = peak_of(); *left = *all - used; DONE; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered;
  enter();
  for (block *b = blocks; b; b = b->next)
    if ((char *)at >= b->start && (char *)at < b->start + b->size) {
      a->type = b->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
      a->hostPointer = a->devicePointer = (void *)at;
    }
  leave();
  DONE;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { memmove(to, from, n); DONE; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) { memmove(to, from, n); DONE; }
cudaError_t cudaMemset(void *to, int value, size_t n) { memset(to, value, n); DONE; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) { memset(to, value, n); DONE; }

static int devices(void) { const char *n = getenv("PRETEND_DEVICES"); return n ? atoi(n) : 1; }
cudaError_t cudaGetDeviceCount(int *n) { *n = devices(); DONE; }
cudaError_t cudaGetDevice(int *d) { *d = current; DONE; }
cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= devices()) return cudaErrorInvalidDevice; current = d; DONE; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = peak_of(), p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->sharedMemPerBlock = 49152;
  p->sharedMemPerMultiprocessor = 233472, p->sharedMemPerBlockOptin = 232448, p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 52428800;
  DONE;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = 0; DONE; }
cudaError_t cudaDeviceCanAccessPeer(int *yes, int a, int b) { *yes = 0; DONE; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; DONE; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; DONE; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -3; DONE; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int d) { snprintf(id, n, "0000:%02d:00.0", d); DONE; }

static cudaError_t a_name(void *at) { static size_t n = 64; *(size_t *)at = n += 8; DONE; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return a_name(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return a_name(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return a_name(s); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; DONE; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; DONE; }
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d,
    const cudaGraphEdgeData **e, size_t *n) { *c = cudaStreamCaptureStatusNone; DONE; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return a_name(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return a_name(e); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; DONE; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { DONE; }
NOTHING(cudaStreamDestroy, cudaStream_t s)
NOTHING(cudaStreamQuery, cudaStream_t s)
NOTHING(cudaStreamSynchronize, cudaStream_t s)
NOTHING(cudaStreamWaitEvent, cudaStream_t s, cudaEvent_t e, unsigned f)
NOTHING(cudaEventDestroy, cudaEvent_t e)
NOTHING(cudaEventRecord, cudaEvent_t e, cudaStream_t s)
NOTHING(cudaEventRecordWithFlags, cudaEvent_t e, cudaStream_t s, unsigned f)
NOTHING(cudaEventQuery, cudaEvent_t e)
NOTHING(cudaEventSynchronize, cudaEvent_t e)
NOTHING(cudaDeviceSynchronize, void)
NOTHING(cudaProfilerStart, void)
NOTHING(cudaProfilerStop, void)

static __thread cudaError_t last;
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) { cudaError_t found = last; last = cudaSuccess; return found; }
static cudaError_t kernel(void) { return last = cudaErrorNotSupported; }  /* past the dispatcher */
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { return kernel(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) { return kernel(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return kernel(); }

/* The driver, of which PyTorch looks some functions up by name. */
static int unknown(void) { return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "pretend"; return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **f, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = unknown;
  if (found) *found = cudaDriverEntryPointSuccess;
  DONE;
}

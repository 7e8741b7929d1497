// A CUDA driver without a GPU: it gives out addresses, ignores all work, and keeps the PTX of every
// module that is loaded. With it, a program compiles and launches its kernels as it would on the
// device that the environment describes; what it reads back is zeros.
//
//   cc -shared -fPIC -O1 -o libcuda.so.1 fake_cuda.c
//
//   FAKE_CUDA_SM       compute capability, 90 for 9.0 (the default)
//   FAKE_CUDA_DEVICES  devices, 1
//   FAKE_CUDA_SHARED   bytes of shared memory of a block, at most (232448)
//   FAKE_CUDA_SMS      streaming multiprocessors (132)
//   FAKE_CUDA_PTX      folder for the PTX, a file for each module
//   FAKE_CUDA_LAUNCHES file for the kernels that are launched, a line for each with its name, grid,
//                      block and bytes of shared memory, and for copies within the device

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int result;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
enum { DRIVER_VERSION = 13000 };
static const size_t TOTAL_BYTES = (size_t)140 << 30;

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

// Something to point to where a caller wants a handle.
static int anything;

#define HANDLE(function, ...)                                                                      \
  result function(void **handle, ##__VA_ARGS__) {                                                  \
    *handle = &anything;                                                                           \
    return SUCCESS;                                                                                \
  }
#define IGNORED(function)                                                                          \
  result function(void) { return SUCCESS; }

IGNORED(cuInit)
IGNORED(cuCtxSetCurrent)
IGNORED(cuCtxSynchronize)
IGNORED(cuCtxEnablePeerAccess)
IGNORED(cuDevicePrimaryCtxRelease_v2)
IGNORED(cuStreamSynchronize)
IGNORED(cuStreamQuery)
IGNORED(cuStreamDestroy_v2)
IGNORED(cuStreamWaitEvent)
IGNORED(cuEventRecord)
IGNORED(cuEventSynchronize)
IGNORED(cuEventQuery)
IGNORED(cuEventDestroy_v2)
IGNORED(cuMemcpyHtoDAsync_v2)
IGNORED(cuMemcpyHtoD_v2)
IGNORED(cuMemsetD8Async)
IGNORED(cuModuleUnload)
IGNORED(cuLaunchKernelEx)
IGNORED(cuStreamBeginCapture_v2)
IGNORED(cuGraphLaunch)
IGNORED(cuGraphUpload)
IGNORED(cuGraphExecDestroy)
IGNORED(cuGraphDestroy)
IGNORED(cuTensorMapEncodeTiled)
IGNORED(cuTensorMapEncodeIm2col)
HANDLE(cuDevicePrimaryCtxRetain)
HANDLE(cuCtxGetCurrent)
HANDLE(cuStreamCreate)
HANDLE(cuStreamCreateWithPriority)
HANDLE(cuEventCreate)
HANDLE(cuGraphInstantiateWithFlags)

// NVRTC asks for undocumented functions of the driver, and goes without.
result cuGetExportTable(const void **table) {
  static const uintptr_t none[64] = {sizeof none};
  *table = none;
  return NOT_FOUND;
}

result cuDriverGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return SUCCESS;
}

result cuDeviceGetCount(int *count) {
  *count = number("FAKE_CUDA_DEVICES", 1);
  return SUCCESS;
}

result cuDeviceGet(int *device, int index) {
  *device = index;
  return index < number("FAKE_CUDA_DEVICES", 1) ? SUCCESS : INVALID_VALUE;
}

result cuDeviceCanAccessPeer(int *can) {
  *can = 1;
  return SUCCESS;
}

result cuDeviceGetName(char *name, int length, int device) {
  (void)device;
  snprintf(name, length, "sm_%ld without a GPU", number("FAKE_CUDA_SM", 90));
  return SUCCESS;
}

result cuDeviceGetPCIBusId(char *name, int length, int device) {
  (void)device;
  snprintf(name, length, "0000:00:00.0");
  return SUCCESS;
}

result cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  *bytes = TOTAL_BYTES;
  return SUCCESS;
}

result cuMemGetInfo_v2(size_t *available, size_t *total) {
  *available = *total = TOTAL_BYTES;
  return SUCCESS;
}

result cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
  case 1: *value = 1024; break;                                // threads of a block
  case 2: case 3: *value = 1024; break;                        // block, x and y
  case 4: *value = 64; break;                                  // block, z
  case 5: *value = 2147483647; break;                          // grid, x
  case 6: case 7: *value = 65535; break;                       // grid, y and z
  case 8: *value = 49152; break;                               // shared memory of a block
  case 10: *value = 32; break;                                 // threads of a warp
  case 16: *value = number("FAKE_CUDA_SMS", 132); break;
  case 38: *value = 60 << 20; break;                           // second-level cache
  case 75: *value = number("FAKE_CUDA_SM", 90) / 10; break;
  case 76: *value = number("FAKE_CUDA_SM", 90) % 10; break;
  case 97: *value = number("FAKE_CUDA_SHARED", 232448); break; // the same, on request
  default: *value = attribute == 41 || attribute == 115;       // one address space, memory pools
  }
  return SUCCESS;
}

result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = *greatest = 0;
  return SUCCESS;
}

result cuEventElapsedTime(float *ms) {
  *ms = 1;
  return SUCCESS;
}
result cuEventElapsedTime_v2(float *ms) { return cuEventElapsedTime(ms); }

// Addresses that nobody touches take no memory. What was given out is not taken back, except from
// the host.
static result reserve(uintptr_t *address, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
  *address = (uintptr_t)memory;
  return memory == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}
result cuMemAlloc_v2(uintptr_t *address, size_t bytes) { return reserve(address, bytes); }
result cuMemAllocAsync(uintptr_t *address, size_t bytes) { return reserve(address, bytes); }
IGNORED(cuMemFree_v2)
IGNORED(cuMemFreeAsync)

result cuMemAllocHost_v2(void **memory, size_t bytes) {
  *memory = malloc(bytes);
  return *memory ? SUCCESS : OUT_OF_MEMORY;
}
result cuMemHostAlloc(void **memory, size_t bytes) { return cuMemAllocHost_v2(memory, bytes); }
result cuMemFreeHost(void *memory) {
  free(memory);
  return SUCCESS;
}

result cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes) {
  (void)from;
  memset(to, 0, bytes);
  return SUCCESS;
}
result cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes) {
  return cuMemcpyDtoHAsync_v2(to, from, bytes);
}

// The layout of CUDA_MEMCPY2D, as far as copies to the host need it.
struct copy_2d {
  size_t x, y;
  int from_type;
  const void *from_host;
  uintptr_t from_device;
  void *from_array;
  size_t from_pitch, to_x, to_y;
  int to_type;
  char *to_host;
  uintptr_t to_device;
  void *to_array;
  size_t to_pitch, width, height;
};
result cuMemcpy2DAsync_v2(const struct copy_2d *copy) {
  enum { HOST = 1 };
  for (size_t row = 0; copy->to_type == HOST && row < copy->height; row++)
    memset(copy->to_host + (copy->to_y + row) * copy->to_pitch + copy->to_x, 0, copy->width);
  return SUCCESS;
}

result cuStreamEndCapture(void *stream, void **graph) {
  (void)stream;
  *graph = &anything;
  return SUCCESS;
}
result cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
  (void)graph;
  (void)nodes;
  *count = 0;
  return SUCCESS;
}
result cuGraphNodeGetType(void *node, int *type) {
  (void)node;
  *type = 0;
  return SUCCESS;
}

result cuModuleLoadData(void **module, const char *ptx) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static int count;
  *module = &anything;
  const char *folder = getenv("FAKE_CUDA_PTX");
  if (!folder)
    return SUCCESS;
  pthread_mutex_lock(&lock);
  char path[4096];
  snprintf(path, sizeof path, "%s/%05d.ptx", folder, count++);
  pthread_mutex_unlock(&lock);
  FILE *file = fopen(path, "w");
  if (!file || fputs(ptx, file) < 0 || fclose(file)) {
    perror(path);
    return INVALID_VALUE;
  }
  return SUCCESS;
}

// A function is its name.
result cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  *function = strdup(name);
  return *function ? SUCCESS : OUT_OF_MEMORY;
}

static void launched(const char *line) {
  static FILE *file;
  const char *path = getenv("FAKE_CUDA_LAUNCHES");
  if (path && (file || (file = fopen(path, "w")))) {
    fprintf(file, "%s\n", line);
    fflush(file);
  }
}

result cuMemcpyDtoDAsync_v2(void) {
  launched("copy within the device");
  return SUCCESS;
}

result cuFuncSetAttribute(void *function, int attribute, int value) {
  (void)function;
  enum { MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
  int fits = value <= number("FAKE_CUDA_SHARED", 232448);
  return attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES || fits ? SUCCESS : INVALID_VALUE;
}

// Refuses what the device could not launch.
result cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x,
                      unsigned y, unsigned z, unsigned shared_bytes) {
  char line[512];
  snprintf(line, sizeof line, "%s %u,%u,%u %u,%u,%u %u", (const char *)function, grid_x, grid_y,
           grid_z, x, y, z, shared_bytes);
  launched(line);
  int threads = x >= 1 && y >= 1 && z >= 1 && (uint64_t)x * y * z <= 1024;
  int grid = grid_x >= 1 && grid_x <= 2147483647 && grid_y >= 1 && grid_y <= 65535 &&
             grid_z >= 1 && grid_z <= 65535;
  int shared = shared_bytes <= number("FAKE_CUDA_SHARED", 232448);
  return threads && grid && shared ? SUCCESS : INVALID_VALUE;
}

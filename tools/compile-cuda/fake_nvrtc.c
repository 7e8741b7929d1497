// NVRTC that compiles nothing: what it hands back in place of PTX is the source. With it and the
// driver of fake_cuda.c, FAKE_CUDA_PTX has the CUDA C++ of every kernel, within seconds.
//
//   cc -shared -fPIC -O1 -o libnvrtc.so fake_nvrtc.c

#include <stdlib.h>
#include <string.h>

typedef int result;
enum { SUCCESS = 0, OUT_OF_MEMORY = 1 };

result nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return SUCCESS;
}

// A program is a copy of its source.
result nvrtcCreateProgram(char **program, const char *source) {
  *program = strdup(source);
  return *program ? SUCCESS : OUT_OF_MEMORY;
}

result nvrtcDestroyProgram(char **program) {
  free(*program);
  *program = NULL;
  return SUCCESS;
}

result nvrtcCompileProgram(const char *program) {
  (void)program;
  return SUCCESS;
}

result nvrtcGetPTXSize(const char *program, size_t *bytes) {
  *bytes = strlen(program) + 1;
  return SUCCESS;
}

result nvrtcGetPTX(const char *program, char *ptx) {
  strcpy(ptx, program);
  return SUCCESS;
}

result nvrtcGetProgramLogSize(const char *program, size_t *bytes) {
  (void)program;
  *bytes = 1;
  return SUCCESS;
}

result nvrtcGetProgramLog(const char *program, char *log) {
  (void)program;
  *log = 0;
  return SUCCESS;
}

const char *nvrtcGetErrorString(result result) {
  (void)result;
  return "none";
}

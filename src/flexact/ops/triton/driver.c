/* Launches compiled kernels on an NVIDIA GPU through the CUDA driver, several in one call. `driver.py` calls it.

   The driver's library is opened when the first kernel is loaded, so this file needs neither CUDA's headers nor its
   libraries to compile. The declarations below are those of cuda.h. */

#include <dlfcn.h>
#include <stdint.h>
#include <stddef.h>

#define MOST_PARAMETERS 64
#define MISALIGNED (-1)
#define NO_DRIVER (-2)
#define MAX_DYNAMIC_SHARED 8  /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
#define DEFAULT_SHARED 49152  /* bytes that need no permission */
#define RELAXED 2  /* CU_STREAM_CAPTURE_MODE_RELAXED */

typedef int (*GetCurrent)(void **context);
typedef int (*SetCurrent)(void *context);
typedef int (*Retain)(void **context, int device);
typedef int (*ExchangeMode)(int *mode);
typedef int (*LoadData)(void **module, const void *image);
typedef int (*GetFunction)(void **function, void *module, const char *name);
typedef int (*SetAttribute)(void *function, int attribute, int value);
typedef int (*LaunchKernel)(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                            unsigned threads_z, unsigned shared, void *stream, void **parameters, void **extra);
typedef int (*GetErrorString)(int error, const char **text);

static struct {
    GetCurrent get_current;
    SetCurrent set_current;
    Retain retain;
    ExchangeMode exchange_mode;
    LoadData load_data;
    GetFunction get_function;
    SetAttribute set_attribute;
    LaunchKernel launch_kernel;
    GetErrorString get_error_string;
} driver;

/* A kernel with its grid and parameters. A parameter is the address with the number `source`, or `value` if `source`
   is negative. */
typedef struct {
    void *function;
    uint32_t grid[3], threads, shared;
    int32_t count;
    uint64_t values[MOST_PARAMETERS];
    int8_t sources[MOST_PARAMETERS];
    int8_t aligned[MOST_PARAMETERS]; /* whether the kernel was compiled for an address that 16 divides */
} Kernel;

static int open_driver(void) {
    if (driver.launch_kernel) return 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return NO_DRIVER;
    driver.get_current = (GetCurrent)dlsym(library, "cuCtxGetCurrent");
    driver.set_current = (SetCurrent)dlsym(library, "cuCtxSetCurrent");
    driver.retain = (Retain)dlsym(library, "cuDevicePrimaryCtxRetain");
    driver.exchange_mode = (ExchangeMode)dlsym(library, "cuThreadExchangeStreamCaptureMode");
    driver.load_data = (LoadData)dlsym(library, "cuModuleLoadData");
    driver.get_function = (GetFunction)dlsym(library, "cuModuleGetFunction");
    driver.set_attribute = (SetAttribute)dlsym(library, "cuFuncSetAttribute");
    driver.get_error_string = (GetErrorString)dlsym(library, "cuGetErrorString");
    LaunchKernel launch_kernel = (LaunchKernel)dlsym(library, "cuLaunchKernel");
    if (!driver.get_current || !driver.set_current || !driver.retain || !driver.exchange_mode || !driver.load_data || !driver.get_function ||
        !driver.set_attribute || !driver.get_error_string || !launch_kernel)
        return NO_DRIVER;
    driver.launch_kernel = launch_kernel;
    return 0;
}

/* Make the device's primary context current in a thread that has no context, as PyTorch does. */
static int enter(int device) {
    void *context = NULL;
    const int failed = driver.get_current(&context);
    if (failed || context) return failed;
    const int missing = driver.retain(&context, device);
    return missing ? missing : driver.set_current(context);
}

/* Load a module from a cubin. A load would end the capture of a CUDA graph in any thread, unless the mode is relaxed. */
static int load_module(void **module, const void *cubin) {
    int mode = RELAXED;
    int failed = driver.exchange_mode(&mode);
    if (failed) return failed;
    failed = driver.load_data(module, cubin);
    const int not_restored = driver.exchange_mode(&mode);
    return failed ? failed : not_restored;
}

/* Load a kernel from a cubin. Return 0, an error of the driver, or NO_DRIVER. */
int load_kernel(const void *cubin, const char *name, int shared, int device, void **function) {
    int failed = open_driver();
    if (!failed) failed = enter(device);
    void *module = NULL;
    if (!failed) failed = load_module(&module, cubin);
    if (!failed) failed = driver.get_function(function, module, name);
    if (!failed && shared > DEFAULT_SHARED) failed = driver.set_attribute(*function, MAX_DYNAMIC_SHARED, shared);
    return failed;
}

/* Return 0, or MISALIGNED if an address is not a multiple of 16 although its kernel was compiled for one that is. */
int check_alignment(const Kernel *const *kernels, int count, const uint64_t *addresses) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < kernels[i]->count; j++)
            if (kernels[i]->aligned[j] && addresses[kernels[i]->sources[j]] % 16) return MISALIGNED;
    return 0;
}

/* Launch kernels one after the other. Return 0, an error of the driver, or MISALIGNED before anything was launched. */
int launch_kernels(const Kernel *const *kernels, int count, const uint64_t *addresses, int device, void *stream) {
    int failed = check_alignment(kernels, count, addresses);
    if (!failed) failed = enter(device);
    for (int i = 0; i < count && !failed; i++) {
        const Kernel *kernel = kernels[i];
        const void *parameters[MOST_PARAMETERS];
        for (int j = 0; j < kernel->count; j++) {
            const int source = kernel->sources[j];
            parameters[j] = source < 0 ? &kernel->values[j] : &addresses[source];
        }
        failed = driver.launch_kernel(kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2],
                                      kernel->threads, 1, 1, kernel->shared, stream, (void **)parameters, NULL);
    }
    return failed;
}

/* Return the driver's description of an error. */
const char *error_text(int error) {
    const char *text = NULL;
    if (driver.get_error_string) driver.get_error_string(error, &text);
    return text ? text : "unknown error";
}

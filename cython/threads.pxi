# On which cores the kernels' threads run; a part of _kernels.pyx.


cdef extern from "<sched.h>" nogil:
    ctypedef struct cpu_set_t:
        pass
    int sched_setaffinity(int pid, size_t num_bytes, const cpu_set_t* cores)
    int sched_getaffinity(int pid, size_t num_bytes, cpu_set_t* cores)
    void CPU_SET_S(int core, size_t num_bytes, cpu_set_t* cores)
    int CPU_ISSET_S(int core, size_t num_bytes, const cpu_set_t* cores)

cdef struct CoreSet:
    cpu_set_t[8] parts  # of 1024 cores each, as one

cdef int MAX_CORES = 8 * sizeof(CoreSet)


def pin_threads(const int32_t[::1] cores not None):
    """Bind thread i of a team of len(cores) threads to cores[i]; the calling thread is thread 0.

    Threads of OpenMP's pool keep their number, and their core, as long as all teams have this size or one thread.
    """
    cdef int num_threads = <int> cores.shape[0]
    cdef int32_t[::1] errors = np.zeros(num_threads, np.int32)
    cdef int i
    for i in range(num_threads):
        if not 0 <= cores[i] < MAX_CORES:
            raise ValueError(f"core {cores[i]} of thread {i} is not between 0 and {MAX_CORES - 1}")
    if num_threads == 0:
        return
    with nogil, parallel(num_threads=num_threads):
        errors[threadid()] = bind_self(cores[threadid()])
    for i in range(num_threads):
        if errors[i]:
            raise OSError(errors[i], f"thread {i} cannot be bound to core {cores[i]}")


def thread_cores(int num_threads):
    """The cores that each thread of a team may run on, a tuple of tuples; shorter if OpenMP gives fewer threads."""
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
    cdef uint8_t[:, ::1] sets = np.zeros((num_threads, sizeof(CoreSet)), np.uint8)
    cdef int i, core
    with nogil, parallel(num_threads=num_threads):
        sched_getaffinity(0, sizeof(CoreSet), <cpu_set_t*> &sets[threadid(), 0])
    found = [
        tuple([core for core in range(MAX_CORES) if CPU_ISSET_S(core, sizeof(CoreSet), <cpu_set_t*> &sets[i, 0])])
        for i in range(num_threads)
    ]
    return tuple([cores for cores in found if cores])


cdef int bind_self(int core) noexcept nogil:
    """Let the calling thread run on one core only; 0, or the error's number."""
    cdef CoreSet cores
    memset(&cores, 0, sizeof(cores))
    CPU_SET_S(core, sizeof(cores), cores.parts)
    return errno if sched_setaffinity(0, sizeof(cores), cores.parts) else 0

//! Which kernels are launched.

use std::collections::HashSet;

/// Does some work. Returns with its result the keys of the kernels that are launched meanwhile, by
/// any thread: kernels with one key are one to CubeCL, which compiles it once in a process. What
/// [Flex](super::DeviceSpec::Flex) does launches none, nor does the replay of a graph.
pub fn launched<T>(work: impl FnOnce() -> T) -> (T, HashSet<u128>) {
    #[cfg(feature = "cube")]
    {
        let collected = cubecl::launched::LaunchedKernels::new();
        let result = work();
        (result, collected.finish().into_iter().collect())
    }
    #[cfg(not(feature = "cube"))]
    (work(), HashSet::new())
}

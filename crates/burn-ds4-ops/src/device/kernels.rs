//! Compiled kernels on disk.

use std::path::{Path, PathBuf};

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};
use cubecl_environment::environment::file_name;
use cubecl_environment::persistence::{Access, Database};
use cubecl_environment::records::RecordLevel;

/// Why compiled kernels cannot be kept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelStoreError {
    /// A device has been used before.
    #[error("kernels can only be kept from the first use of a device on")]
    TooLate,
    /// Nothing tells this build's kernels from another's.
    #[error("the program has no build id: its linker was told to leave it out")]
    NoBuildId,
    /// The folder has no file that can be used.
    #[error("`{file}` is no store of kernels, and none can be made there: {reason}")]
    Unusable {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Where kernels are kept unless a program is told otherwise: `burn-ds4` in the user's directory
/// for caches.
pub fn kernel_folder() -> PathBuf {
    CacheConfig::Global.root().with_file_name("burn-ds4")
}

/// Keeps the kernels that CUDA devices compile in a folder, and takes those that it has. To be
/// called before any device is used. Returns the file they are in, which is CubeCL's store, a
/// database.
///
/// A kernel is found again by the same build of the program, on a GPU of the same architecture,
/// with the same release of NVRTC: machines may share a folder, and it may be copied. Processes may
/// use it at once. One that cannot be written to is read.
///
/// # Errors
///
/// [`KernelStoreError`] says why nothing is kept. Devices then compile all they need, as without
/// this call.
pub fn keep_kernels(folder: &Path) -> Result<PathBuf, KernelStoreError> {
    if buildid::build_id().is_none() {
        return Err(KernelStoreError::NoBuildId);
    }
    // The build and the architecture are in the keys of the kernels.
    let name = format!("burn-ds4-{}{}", env!("CARGO_PKG_VERSION"), compiler());
    let file = folder.join(file_name(&name));
    // CubeCL would go on without, and warn at every kernel. One that is only read is as good.
    let opened = Database::open_at(&file, Access::ReadWrite);
    let opened = opened.or_else(|_| Database::open_at(&file, Access::ReadOnly));
    if let Err(reason) = opened {
        return Err(KernelStoreError::Unusable { file, reason });
    }
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    config.environment.name = name;
    config.environment.path = CacheConfig::Directory(folder.to_path_buf());
    config.environment.records.level = RecordLevel::Off;
    match CubeClRuntimeConfig::try_set(config) {
        true => Ok(file),
        false => Err(KernelStoreError::TooLate),
    }
}

/// What compiles the kernels, as a part of a name.
fn compiler() -> String {
    #[cfg(feature = "cuda")]
    {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is there, and both numbers outlive the call.
        let has_nvrtc = unsafe {
            cudarc::nvrtc::sys::is_culib_present()
                && cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor)
                    == cudarc::nvrtc::sys::nvrtcResult::NVRTC_SUCCESS
        };
        if has_nvrtc {
            return format!("-nvrtc-{major}.{minor}");
        }
    }
    String::new()
}

//! Where compiled kernels are kept.

use std::path::Path;
#[cfg(feature = "kernel-cache")]
use std::{path::PathBuf, sync::OnceLock};

/// What is said in place of a folder.
#[cfg(feature = "kernel-cache")]
const NONE: &str = "none";
/// Most bytes that the driver keeps of the machine code of all programs: as much as it can.
#[cfg(feature = "kernel-cache")]
const DRIVER_BYTES: &str = "4294967296";

/// The folder, in a process whose program has been told.
#[cfg(feature = "kernel-cache")]
static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Kernels are kept in this folder, or in the usual one, from when the first CUDA device is chosen.
/// Beside them is the machine code that the driver makes of them, unless it has been told where to
/// keep that.
///
/// # Safety
///
/// No other thread reads or sets variables of the environment meanwhile.
pub unsafe fn keep(folder: Option<&Path>) {
    #[cfg(feature = "kernel-cache")]
    {
        if folder == Some(Path::new(NONE)) {
            return;
        }
        let folder = folder.map_or_else(burn_ds4_ops::device::kernel_folder, Path::to_path_buf);
        let driver = folder.join("driver").into_os_string();
        for (name, value) in [
            ("CUDA_CACHE_PATH", driver),
            ("CUDA_CACHE_MAXSIZE", DRIVER_BYTES.into()),
        ] {
            if std::env::var_os(name).is_none() {
                // SAFETY: that of this function.
                unsafe { std::env::set_var(name, value) };
            }
        }
        let _ = FOLDER.set(folder);
    }
    #[cfg(not(feature = "kernel-cache"))]
    let _ = folder;
}

/// Keeps kernels, if that was said. To be called before a CUDA device is used.
pub fn begin() {
    #[cfg(feature = "kernel-cache")]
    if let Some(folder) = FOLDER.get() {
        match burn_ds4_ops::device::keep_kernels(folder) {
            Ok(file) => log::debug!("compiled kernels are kept in {}", file.display()),
            Err(error) => log::warn!("compiled kernels are not kept: {error}"),
        }
    }
}

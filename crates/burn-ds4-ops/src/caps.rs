//! What a device can do, as far as kernels and their launches depend on it.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use cubecl::client::Client;
use cubecl::features::{AtomicUsage, Plane};
use cubecl::ir::{DeviceProperties, FloatKind, Type, UIntKind};
use cubecl::prelude::*;

/// The architecture from which on SMs copy to shared memory asynchronously, and multiply tiles of
/// 16 by 8 by 16 in `f16` and `bf16`.
const TENSOR_CORES_FROM: u32 = 80;
/// The architecture from which on SMs convert E4M3 codes to `f16` by an instruction.
const FP8_CONVERSION_FROM: u32 = 89;
/// The architecture that has products of warpgroups.
const WGMMA_OF: u32 = 90;
/// Planes of a cube that has not fewer than [`LEAST_UNITS`]. More are no faster where a plane has
/// eight lanes, as with a software driver.
const MOST_PLANES: u32 = 32;
const LEAST_UNITS: u32 = 256;
/// Shared memory that compilers reserve for themselves.
const RESERVED_SHARED_BYTES: usize = 1024;
/// The environment variable with [`Limits`].
const LIMITS: &str = "DS4_CAPS";

/// The instructions that a kernel may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    /// The code generator emits CUDA C++, which can contain PTX.
    pub ptx: bool,
    /// The architecture of the SMs, 90 for compute capability 9.0, which the PTX may be of; 0
    /// without PTX.
    pub sm: u32,
    /// A plane can synchronise its own lanes alone.
    pub sync_plane: bool,
}

impl Target {
    /// Whether PTX may have the instructions of this architecture.
    pub(crate) const fn is_at_least(self, sm: u32) -> bool {
        self.sm >= sm
    }
}

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Caps {
    /// The instructions that kernels may use.
    pub target: Target,
    /// The lanes of a plane, at least and at most.
    pub plane_sizes: [u32; 2],
    /// Units of a cube, at most.
    pub cube_units: u32,
    /// Bytes of shared memory of a cube, at most.
    pub shared_bytes: usize,
    /// The SMs of the device, or one if it does not report them.
    pub processors: u32,
    /// Buffers of a kernel, at most.
    pub bindings: u32,
    /// Whether kernels can use tensor cores on operands that they copy asynchronously.
    pub tensor_cores: bool,
    /// Whether warpgroups can multiply, by instructions of this one architecture.
    pub wgmma: bool,
    /// Whether an SM converts E4M3 codes to `f16` by an instruction.
    pub fp8_conversion: bool,
    /// Whether kernels can count in `u32` atomics.
    pub counters: bool,
    /// Whether a kernel can leave its end to the last-arriving cube, which must see what the other
    /// cubes wrote.
    pub last_cube: bool,
}

thread_local! {
    /// One entry for each device in use. Properties that are held stay where they are.
    static KNOWN: RefCell<Vec<(Arc<DeviceProperties>, Caps)>> = const { RefCell::new(Vec::new()) };
}

impl Caps {
    pub(crate) fn of(client: &Client) -> Self {
        KNOWN.with_borrow_mut(|known| {
            let same =
                |(known, _): &&(Arc<_>, _)| std::ptr::eq(Arc::as_ptr(known), client.properties());
            if let Some((_, caps)) = known.iter().find(same) {
                return *caps;
            }
            let properties = client.properties_shared();
            // Opening a device by name refuses what cannot be read.
            let limits = Limits::of_tests().unwrap_or_default();
            let caps = limits.apply(Self::new(client, &properties));
            known.push((properties, caps));
            caps
        })
    }

    /// What the runtime says of a device; not [`consistent`](Self::consistent) yet.
    fn new(client: &Client, properties: &DeviceProperties) -> Self {
        let (hardware, features) = (&properties.hardware, &properties.features);
        let ptx = cfg!(feature = "cuda") && client.name() == "cuda";
        // CubeCL names the code that it compiles for: `ptx_sm90`.
        let fingerprint = properties.identity.fingerprint.rsplit_once("sm");
        let sm = fingerprint.and_then(|(_, version)| version.parse().ok());
        let e4m3 = ElemType::Float(FloatKind::E4M3);
        let u32 = Type::atomic(ElemType::UInt(UIntKind::U32));
        let counters = properties.atomic_type_usage(u32);
        let counters = counters.contains(AtomicUsage::Add);
        Self {
            target: Target {
                ptx,
                sm: sm.unwrap_or(0),
                sync_plane: features.plane.contains(Plane::Sync),
            },
            plane_sizes: [hardware.plane_size_min, hardware.plane_size_max],
            cube_units: hardware
                .max_units_per_cube
                .min(LEAST_UNITS.max(MOST_PLANES * hardware.plane_size_max)),
            shared_bytes: hardware.max_shared_memory_size,
            processors: hardware.num_streaming_multiprocessors.unwrap_or(1),
            bindings: hardware.max_bindings,
            tensor_cores: features.copy_async,
            wgmma: true,
            fp8_conversion: features.matmul.mma.iter().any(|mma| mma.a_type == e4m3),
            counters,
            last_cube: features.device_memory_scope && counters,
        }
    }

    /// Without what depends on something else that is missing.
    fn consistent(mut self) -> Self {
        if !self.target.ptx {
            self.target.sm = 0;
        }
        let target = self.target;
        self.tensor_cores &= target.is_at_least(TENSOR_CORES_FROM) && self.plane() == Some(32);
        self.wgmma &= target.sm == WGMMA_OF && self.tensor_cores;
        self.fp8_conversion &= target.is_at_least(FP8_CONVERSION_FROM) && self.tensor_cores;
        self
    }

    /// The lanes of a plane, where kernels can rely on the number. At most 32, because kernels hold
    /// a ballot of the lanes in one word.
    pub(crate) fn plane(&self) -> Option<u32> {
        let [least, most] = self.plane_sizes;
        (least == most && (4..=32).contains(&most)).then_some(most)
    }

    /// Neighbouring units of a cube that are in one plane, whatever its size: a power of two, at
    /// most 32.
    pub(crate) fn lanes(&self) -> u32 {
        let [least, _] = self.plane_sizes;
        1 << least.clamp(1, 32).ilog2()
    }

    /// Whether a cube can have `bytes` bytes of shared memory, in addition to what compilers
    /// reserve.
    pub(crate) fn fits_shared(&self, bytes: usize) -> bool {
        bytes + RESERVED_SHARED_BYTES <= self.shared_bytes
    }
}

/// Limits that tests set to run the kernels of lesser devices, such as
/// `shared=101376,sm=75,ptx=0,tensor_cores=0,plane_min=4,memory=1000000`. Each may be left out;
/// `plane_min` makes the size of a plane a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Limits {
    shared_bytes: Option<usize>,
    sm: Option<u32>,
    no_ptx: bool,
    no_tensor_cores: bool,
    plane_min: Option<u32>,
    /// Bytes of the memory of a device.
    memory: Option<u64>,
}

impl Limits {
    /// Those of the environment, or the entry there that is none.
    fn of_tests() -> Result<Self, &'static str> {
        static SET: OnceLock<Result<Limits, String>> = OnceLock::new();
        let set = SET.get_or_init(|| {
            let list = std::env::var_os(LIMITS).unwrap_or_default();
            Self::parse(&list.to_string_lossy())
        });
        set.as_ref().copied().map_err(String::as_str)
    }

    /// Reads a list of limits; the error is the entry at fault.
    fn parse(list: &str) -> Result<Self, String> {
        let mut limits = Self::default();
        for entry in list
            .split(',')
            .map(str::trim)
            .filter(|entry| !entry.is_empty())
        {
            let wrong = || entry.to_owned();
            let (name, value) = entry.split_once('=').ok_or_else(wrong)?;
            if name == "memory" {
                limits.memory = Some(value.parse().map_err(|_| wrong())?);
                continue;
            }
            let number: u32 = value.parse().map_err(|_| wrong())?;
            match (name, number) {
                ("shared", bytes) => limits.shared_bytes = Some(bytes as usize),
                ("sm", version) => limits.sm = Some(version),
                ("plane_min", 1..) => limits.plane_min = Some(number),
                ("ptx", 0) => limits.no_ptx = true,
                ("tensor_cores", 0) => limits.no_tensor_cores = true,
                _ => return Err(wrong()),
            }
        }
        Ok(limits)
    }

    fn apply(self, mut caps: Caps) -> Caps {
        if let Some(bytes) = self.shared_bytes {
            caps.shared_bytes = caps.shared_bytes.min(bytes);
        }
        if let Some(version) = self.sm {
            caps.target.sm = caps.target.sm.min(version);
        }
        if let Some(lanes) = self.plane_min {
            caps.plane_sizes[0] = caps.plane_sizes[0].min(lanes);
        }
        caps.target.ptx &= !self.no_ptx;
        caps.tensor_cores &= !self.no_tensor_cores;
        caps.consistent()
    }
}

/// The memory that devices have, if tests limit it.
pub(crate) fn memory_limit() -> Option<u64> {
    Limits::of_tests().ok().and_then(|limits| limits.memory)
}

/// Checks the limits of the environment.
///
/// # Errors
///
/// What is wrong with them.
pub(crate) fn check_limits() -> Result<(), String> {
    let limits = Limits::of_tests().map(|_| ());
    limits.map_err(|entry| {
        format!(
            "{LIMITS} has `{entry}`, expected `shared=BYTES`, `sm=VERSION`, `plane_min=LANES`, \
             `memory=BYTES`, `ptx=0` or `tensor_cores=0`, separated by commas"
        )
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const H200: Caps = Caps {
        target: Target {
            ptx: true,
            sm: 90,
            sync_plane: true,
        },
        plane_sizes: [32, 32],
        cube_units: 1024,
        shared_bytes: 232_448,
        processors: 132,
        bindings: 1024,
        tensor_cores: true,
        wgmma: true,
        fp8_conversion: true,
        counters: true,
        last_cube: true,
    };

    fn limited(list: &str) -> Caps {
        Limits::parse(list).expect("a list of limits").apply(H200)
    }

    #[test]
    fn limits_take_away_what_depends_on_them() {
        assert_eq!(limited(""), H200);
        let shared = limited("shared=101376");
        assert_eq!(shared.shared_bytes, 101_376);
        assert!(shared.fits_shared(100_352) && !shared.fits_shared(100_353));
        assert_eq!(limited("shared=999999999").shared_bytes, H200.shared_bytes);
        let turing = limited("sm=75, shared=65536");
        assert_eq!(turing.target.sm, 75);
        assert!(turing.target.ptx && !turing.tensor_cores && !turing.fp8_conversion);
        let ampere = limited("sm=86");
        assert!(ampere.tensor_cores && !ampere.fp8_conversion);
        for list in ["ptx=0", "tensor_cores=0"] {
            let caps = limited(list);
            assert!(!caps.tensor_cores && !caps.fp8_conversion, "{list}");
        }
        assert_eq!(limited("ptx=0").target.sm, 0);
    }

    #[test]
    fn what_is_no_limit_is_named() {
        for entry in [
            "shared",
            "shared=",
            "shared=-1",
            "sm=x",
            "ptx=1",
            "plane_min=0",
            "memory=all",
        ] {
            let error = Limits::parse(&format!("sm=90,{entry}"));
            assert_eq!(error, Err(entry.to_owned()));
        }
    }

    #[test]
    fn a_plane_of_no_fixed_size_or_of_too_many_lanes_is_none() {
        let sizes = |plane_sizes| Caps {
            plane_sizes,
            ..H200
        };
        assert_eq!(sizes([32, 32]).plane(), Some(32));
        assert_eq!(sizes([8, 8]).plane(), Some(8));
        for (none, lanes) in [([1, 1], 1), ([8, 32], 8), ([64, 64], 32), ([0, 12], 1)] {
            let caps = sizes(none).consistent();
            assert_eq!(caps.plane(), None);
            assert_eq!(caps.lanes(), lanes);
            assert!(!caps.tensor_cores);
        }
        assert_eq!(limited("plane_min=12").plane_sizes, [12, 32]);
        assert_eq!(limited("plane_min=12").lanes(), 8);
    }
}

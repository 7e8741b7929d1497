//! The adapter of wgpu that operators run on.

use std::sync::OnceLock;

use burn::tensor::wgpu::{WgpuBackend, WgpuInitError, WgpuSetup, wgpu};
use burn::tensor::{Device, DeviceKind, DeviceType};
use cubecl::device::WgpuDevice;
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi};

use super::{DeviceError, DeviceSpec};

/// What kernels need at least. Those that use more have a form that does not.
const LEAST: [(&str, usize); 3] = [
    ("units of a cube", 256),
    ("bytes of shared memory", 32 << 10),
    ("buffers of a kernel", 12),
];

/// An adapter that operators can run on.
#[derive(Clone, Debug)]
pub(super) struct Adapter {
    pub device: Device,
    /// It is no software driver.
    pub is_gpu: bool,
}

/// The best adapter, or why there is none. The first call opens it, and later ones say the same.
pub(super) fn find() -> Result<Adapter, DeviceError> {
    static FOUND: OnceLock<Result<Adapter, DeviceError>> = OnceLock::new();
    FOUND.get_or_init(open).clone()
}

/// Whether the best adapter is a GPU. A software driver is not opened to find that out.
pub(super) fn has_gpu() -> bool {
    listed().is_ok_and(|listed| listed.has_gpu) && find().is_ok_and(|adapter| adapter.is_gpu)
}

/// What is known without opening an adapter.
#[derive(Clone, Debug)]
struct Listed {
    api: WgpuBackend,
    /// Not all adapters are software drivers.
    has_gpu: bool,
}

fn listed() -> Result<Listed, DeviceError> {
    static LISTED: OnceLock<Result<Listed, DeviceError>> = OnceLock::new();
    let list = || {
        let found = Device::enumerate(DeviceType::Wgpu);
        let own = (!found.is_empty()).then(AutoGraphicsApi::backend);
        let on = |api| cubecl::Device::Wgpu(WgpuDevice::default()).on(api);
        let api = choose(own, |api| on(api).is_ok())?;
        let software = Device::wgpu(DeviceKind::Cpu);
        // Another API than CubeCL's own choice has no GPU.
        let has_gpu = api == WgpuBackend::Auto && found.iter().any(|other| *other != software);
        Ok(Listed { api, has_gpu })
    };
    LISTED.get_or_init(list).clone()
}

fn open() -> Result<Adapter, DeviceError> {
    let device = DeviceSpec::Wgpu;
    let Listed { api, has_gpu } = listed()?;
    let opened = Device::wgpu_options().graphics_api(api).init_with_setup();
    let (is_gpu, has_planes) = match opened {
        Ok((_, WgpuSetup { adapter, .. })) => (
            adapter.get_info().device_type != wgpu::DeviceType::Cpu,
            adapter.features().contains(wgpu::Features::SUBGROUP),
        ),
        // It has been opened by whoever has used it, and does not say any more what it is.
        Err(WgpuInitError::Registration { .. }) => (has_gpu, true),
        Err(error) => {
            let reason = error.to_string();
            return Err(DeviceError::NotPresent { device, reason });
        }
    };
    let chosen = WgpuDevice::default().on(api);
    let client = cubecl::Device::Wgpu(chosen.clone()).client();
    let properties = client.properties();
    let hardware = &properties.hardware;
    let has = [
        hardware.max_units_per_cube as usize,
        hardware.max_shared_memory_size,
        hardware.max_bindings as usize,
    ];
    let lack = match has_planes {
        true => lack(has),
        false => Some("no operations of subgroups".into()),
    };
    match lack {
        Some(lack) => Err(DeviceError::Unfit {
            device,
            reason: format!("{} has {lack}", properties.identity.name),
        }),
        None => Ok(Adapter {
            device: chosen.into(),
            is_gpu,
        }),
    }
}

/// The graphics API to use, where CubeCL by itself would use `own`.
///
/// That is OpenGL where nothing else reaches a GPU. Kernels do not run there, but do on a software
/// driver of another API.
fn choose(
    own: Option<wgpu::Backend>,
    has: impl Fn(WgpuBackend) -> bool,
) -> Result<WgpuBackend, DeviceError> {
    let device = DeviceSpec::Wgpu;
    match own {
        None => Err(DeviceError::NotPresent {
            device,
            reason: "wgpu finds no adapter (on Linux: no Vulkan driver)".into(),
        }),
        Some(wgpu::Backend::Gl) => {
            let others = [WgpuBackend::Vulkan, WgpuBackend::Dx12];
            let other = others.into_iter().find(|api| has(*api));
            other.ok_or_else(|| DeviceError::Unfit {
                device,
                reason: "wgpu finds OpenGL only, they need Vulkan, Metal or DX12 (on Linux: no \
                         Vulkan driver)"
                    .into(),
            })
        }
        Some(_) => Ok(WgpuBackend::Auto),
    }
}

/// What there is too little of.
fn lack(has: [usize; LEAST.len()]) -> Option<String> {
    let mut limits = LEAST.into_iter().zip(has);
    let ((name, least), has) = limits.find(|((_, least), has)| has < least)?;
    Some(format!("{has} {name}, they need {least}"))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Tensor, TensorData};

    use super::*;

    #[test]
    fn opengl_is_left_for_an_api_that_kernels_run_on() {
        let choice = |own, others: &[WgpuBackend]| {
            choose(own, |api| others.contains(&api)).map_err(|error| error.to_string())
        };
        let (vulkan, dx12) = (WgpuBackend::Vulkan, WgpuBackend::Dx12);
        for own in [
            wgpu::Backend::Vulkan,
            wgpu::Backend::Metal,
            wgpu::Backend::Dx12,
        ] {
            assert_eq!(choice(Some(own), &[vulkan]), Ok(WgpuBackend::Auto));
        }
        assert_eq!(choice(Some(wgpu::Backend::Gl), &[dx12, vulkan]), Ok(vulkan));
        assert_eq!(choice(Some(wgpu::Backend::Gl), &[dx12]), Ok(dx12));
        let alone = choice(Some(wgpu::Backend::Gl), &[]).unwrap_err();
        assert!(
            alone.starts_with("device `wgpu` cannot run the operators: wgpu finds OpenGL only"),
            "{alone}"
        );
        let none = choice(None, &[]).unwrap_err();
        assert!(
            none.starts_with("device `wgpu` is not present: wgpu finds no adapter"),
            "{none}"
        );
        assert!(!alone.contains('\n') && !none.contains('\n'));
    }

    #[test]
    fn what_an_adapter_has_too_little_of_is_said() {
        let least = LEAST.map(|(_, least)| least);
        assert_eq!(lack(least), None);
        assert_eq!(lack([usize::MAX; 3]), None);
        for (index, (name, needed)) in LEAST.into_iter().enumerate() {
            let mut has = least;
            has[index] -= 1;
            let expected = format!("{} {name}, they need {needed}", needed - 1);
            assert_eq!(lack(has), Some(expected));
        }
    }

    #[test]
    fn the_adapter_computes_or_is_neither_a_device_nor_the_best_one() {
        match find() {
            Ok(Adapter { device, .. }) => {
                let twice = Tensor::<1>::from_floats([1.5, -2.0], &device) * 2;
                assert_eq!(twice.into_data(), TensorData::from([3.0_f32, -4.0]));
                assert_eq!(DeviceSpec::Wgpu.init(), Ok(device));
            }
            Err(error) => {
                assert_eq!(DeviceSpec::Wgpu.init(), Err(error));
                assert_ne!(DeviceSpec::best(), DeviceSpec::Wgpu);
            }
        }
    }
}

//! From a checkpoint to a model, and how many bytes that takes.

use burn::tensor::{DType, Device};
use burn_ds4_ops::device::may_allocate;

use super::directory::Checkpoint;
use super::error::CheckpointError;
use super::loader::Loader;
use super::names;
use super::options::LoadOptions;
use super::progress::LoadProgress;
use super::stored::Stored;
use crate::config::{AttentionKind, ModelConfig};
use crate::engram::{EngramIds, EngramLookup};
use crate::model::Model;
use crate::placement::{Devices, ModelBytes, Placement, Run};

impl Checkpoint {
    /// Loads the model onto `devices`: a device, or [several](Devices), among which the layers are
    /// divided.
    ///
    /// # Errors
    ///
    /// If tensors are missing, unexpected, mis-shaped or have invalid contents (all of them, in one
    /// error), the model does not fit the host's memory, where that is a device's, a device has not
    /// taken its part, the model cannot be divided as asked, or a device or the model cannot do
    /// what `options` ask for. Nothing stays on any device then.
    pub fn load(
        &self,
        options: &LoadOptions,
        devices: impl Into<Devices>,
    ) -> Result<Model, CheckpointError> {
        self.load_with(Loader::new(self), options, &devices.into())
    }

    /// Loads the model like [`load`](Self::load), and reports progress.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    ///
    /// # Example
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::checkpoint::{Checkpoint, LoadOptions};
    ///
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let (mut done, mut of) = (0, 0);
    /// let progress = |read, total| (done, of) = (read, total);
    /// checkpoint.load_with_progress(&LoadOptions::default(), &Device::flex(), progress)?;
    /// assert!(done > 0);
    /// assert_eq!(done, of);
    /// # }
    /// # Ok::<(), ds4_model::checkpoint::CheckpointError>(())
    /// ```
    pub fn load_with_progress(
        &self,
        options: &LoadOptions,
        devices: impl Into<Devices>,
        progress: impl LoadProgress,
    ) -> Result<Model, CheckpointError> {
        let loader = Loader::new(self).with_progress(progress);
        self.load_with(loader, options, &devices.into())
    }

    /// Counts the bytes that the weights of the [loaded](Self::load) model take on `device`, and
    /// allocates none. Only headers are read, and scales that may fold to those of FP4.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load), except for what is wrong with the contents of tensors.
    ///
    /// # Example
    ///
    /// Packed weights and decoded ones.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use ds4_model::checkpoint::{Checkpoint, LoadOptions};
    ///
    /// let device = Device::flex();
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let packed = checkpoint.weight_bytes(&LoadOptions::default(), &device)?;
    /// let options = LoadOptions { expand: true, ..LoadOptions::default() };
    /// // FP4 takes an eighth of f32, and FP8 a fourth.
    /// assert!(checkpoint.weight_bytes(&options, &device)? > 3 * packed);
    /// # }
    /// # Ok::<(), ds4_model::checkpoint::CheckpointError>(())
    /// ```
    pub fn weight_bytes(
        &self,
        options: &LoadOptions,
        device: &Device,
    ) -> Result<usize, CheckpointError> {
        Ok(self.count(options, device)?.weights())
    }

    /// Counts the bytes of the [loaded](Self::load) model part by part, like
    /// [`weight_bytes`](Self::weight_bytes), and those of the caches of one text of so many
    /// positions.
    ///
    /// # Errors
    ///
    /// As [`weight_bytes`](Self::weight_bytes).
    pub fn model_bytes(
        &self,
        options: &LoadOptions,
        device: &Device,
        positions: usize,
    ) -> Result<ModelBytes, CheckpointError> {
        let bytes = self.count(options, device)?;
        let config = self.config_of(options);
        Ok(bytes.with_caches(&config, options.dtype, positions))
    }

    fn count(&self, options: &LoadOptions, device: &Device) -> Result<ModelBytes, CheckpointError> {
        let placement = Placement::single(device, self.config().layers.len());
        let loader = Loader::of_headers(self);
        self.build(loader, options, &placement, |_, bytes| Some(bytes))
    }

    fn load_with(
        &self,
        loader: Loader<'_>,
        options: &LoadOptions,
        devices: &Devices,
    ) -> Result<Model, CheckpointError> {
        let packed = self.packed_formats().into_iter();
        let is_told = |format: &str| !options.expand && format.ends_with("expanded");
        for (format, weights) in packed.filter(|(format, _)| is_told(format)) {
            let (dir, dtype) = (self.dir().display(), options.dtype);
            log::warn!("{dir}: {weights} weights in {format} to {dtype:?}, as nothing packed fits");
        }
        let first = &devices.devices()[0];
        let bytes = self.model_bytes(options, first, devices.context());
        let (placement, ids) = match bytes {
            Ok(bytes) => {
                let placement = devices.place(&self.config_of(options), &bytes)?;
                for (device, bytes) in placement.bytes_on_devices(&bytes) {
                    self.check_memory(bytes, &device)?;
                }
                // Before all weights are on the device.
                (placement, self.engram_ids()?)
            }
            // Headers that are wrong are reported together with contents that are.
            Err(CheckpointError::Weights(_)) => {
                let placement = Placement::single(first, self.config().layers.len());
                (placement, None)
            }
            Err(error) => return Err(error),
        };
        let built = self.build(loader, options, &placement, |model, _| model);
        let built = built.map(|mut model| {
            let engram = model.config.engram.as_ref().zip(ids);
            model.engrams = engram.map(|(engram, ids)| EngramLookup::new(engram, ids));
            model
        });
        built.map_err(|error| match error {
            CheckpointError::Placement(error) => devices.named(error).into(),
            error => error,
        })
    }

    fn engram_ids(&self) -> Result<Option<EngramIds>, CheckpointError> {
        let tokens = self.config().vocab_size;
        let engram = self.config().engram.as_ref();
        let ids = engram.map(|engram| EngramIds::of_checkpoint(self.dir(), engram, tokens));
        Ok(ids.transpose()?)
    }

    pub(super) fn check_memory(
        &self,
        bytes: usize,
        device: &Device,
    ) -> Result<(), CheckpointError> {
        match may_allocate(device, bytes) {
            true => Ok(()),
            false => Err(CheckpointError::OutOfMemory {
                dir: self.dir().to_path_buf(),
                bytes,
            }),
        }
    }

    /// Asks the loader for all weights. `result` is given the model and its bytes.
    pub(super) fn build<T>(
        &self,
        mut loader: Loader<'_>,
        options: &LoadOptions,
        placement: &Placement,
        result: impl FnOnce(Option<Model>, ModelBytes) -> Option<T>,
    ) -> Result<T, CheckpointError> {
        for Run { device, .. } in placement.runs() {
            if !device.supports_dtype(DType::from(options.dtype)) {
                return Err(CheckpointError::UnsupportedDtype {
                    dtype: options.dtype,
                    device: format!("{device:?}"),
                });
            }
        }
        let config = self.config_of(options);
        let indexed = config
            .layers
            .iter()
            .any(|kind| matches!(kind, AttentionKind::CompressedSparse { .. }));
        if options.quantized_cache && indexed && !config.index_head_dim.is_power_of_two() {
            return Err(CheckpointError::QuantizedIndexer {
                index_head_dim: config.index_head_dim,
            });
        }
        if !options.drafter {
            loader.skip_prefix(names::DRAFTER);
        }
        let mut source = Stored::new(loader, options, placement, placement.first());
        let model = config.build(&mut source, options.quantized_cache);
        source.settle();
        let result = result(model, source.bytes.model);
        match source.refusal {
            // What else is wrong cannot be told from that.
            Some(refusal) => Err(refusal.into()),
            None => source.loader.finish(result),
        }
    }

    /// The configuration of what is loaded.
    fn config_of(&self, options: &LoadOptions) -> ModelConfig {
        let mut config = self.config().clone();
        if !options.drafter {
            config.num_mtp_layers = 0;
            config.dspark = None;
        }
        config
    }
}

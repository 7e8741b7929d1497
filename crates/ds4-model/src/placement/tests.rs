use burn::tensor::Device;
use burn_ds4_ops::device::DeviceSpec;

use super::*;
use crate::placement::check_shared;

fn names(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("cuda:{index}")).collect()
}

fn model(layers: &[usize], embedding: usize, head: usize) -> ModelBytes {
    let layer = |weights: &usize| PartBytes {
        weights: *weights,
        cache: 1,
    };
    ModelBytes {
        embedding,
        layers: layers.iter().map(layer).collect(),
        divided: Vec::new(),
        head,
        drafter: None,
        tables: 0,
    }
}

#[test]
fn the_fullest_device_has_as_little_as_it_can() {
    for (layers, embedding, head, devices, counts) in [
        (vec![9; 6], 0, 0, 1, vec![6]),
        (vec![9; 6], 0, 0, 2, vec![3, 3]),
        (vec![9; 7], 0, 0, 3, vec![3, 2, 2]),
        // What else is with the first layer, and with the last.
        (vec![9; 6], 20, 0, 2, vec![2, 4]),
        (vec![9; 6], 0, 20, 2, vec![4, 2]),
        (vec![9; 6], 0, 60, 2, vec![5, 1]),
        (vec![40, 10, 10, 10, 10], 0, 0, 2, vec![1, 4]),
        (vec![5; 4], 0, 0, 4, vec![1, 1, 1, 1]),
        (vec![], 3, 4, 1, vec![0]),
    ] {
        let plan = Plan::balanced(&model(&layers, embedding, head), &names(devices)).unwrap();
        assert_eq!(plan.counts(), counts, "{layers:?}");
        let ends: Vec<usize> = plan.runs.iter().map(|run| run.end).collect();
        let starts = plan.runs.iter().skip(1).map(|run| run.start);
        assert!(starts.eq(ends[..devices - 1].iter().copied()), "{plan:?}");
    }
}

#[test]
fn every_byte_is_on_one_device_but_for_the_embedding_of_the_drafter() {
    let drafter = PartBytes {
        weights: 30,
        cache: 2,
    };
    let model = ModelBytes {
        drafter: Some(drafter),
        ..model(&[10, 20, 30, 40], 7, 8)
    };
    let whole = Plan::split(&model, &names(1), &[4]).unwrap();
    assert_eq!(whole.bytes[0].weights, 100 + 7 + 8 + 30);
    assert_eq!(whole.bytes[0].cache, 4 + 2);
    assert_eq!(model.weights(), 145);
    let plan = Plan::split(&model, &names(2), &[1, 3]).unwrap();
    let bytes = |weights, cache| PartBytes { weights, cache };
    assert_eq!(plan.bytes, [bytes(17, 1), bytes(90 + 8 + 30 + 7, 3 + 2)]);
}

#[test]
fn a_split_that_does_not_fit_is_refused_with_its_values() {
    let model = model(&[10; 4], 0, 0);
    let refused = |split: &[usize], devices| {
        let error = Plan::split(&model, &names(devices), split).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        refused(&[2, 1], 2),
        "split [2, 1]: it has 3 layers, the model has 4"
    );
    assert_eq!(
        refused(&[4, 0], 2),
        "split [4, 0]: it has no layer for cuda:1"
    );
    assert_eq!(
        refused(&[2, 1, 1], 2),
        "split [2, 1, 1]: it has 3 numbers, there are 2 devices"
    );
    assert_eq!(refused(&[], 0), "devices: none is named");
    let error = Plan::balanced(&model, &names(5)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "devices: 5 of them cannot share 4 layers, cuda:4 would be left without"
    );
    assert_eq!(
        Plan::balanced(&model, &[]).unwrap_err(),
        PlacementError::NoDevice
    );
}

#[test]
fn a_device_with_too_little_memory_is_named() {
    let plan = Plan::split(&model(&[10; 4], 5, 0), &names(2), &[2, 2]).unwrap();
    let memory = |bytes: [Option<usize>; 2]| plan.check(&names(2), &bytes);
    assert_eq!(memory([Some(27), Some(22)]), Ok(()));
    assert_eq!(memory([None, None]), Ok(()));
    assert_eq!(
        memory([None, Some(21)]).unwrap_err().to_string(),
        "cuda:1: layers 2 to 3 take 20 bytes of weights and 2 of caches, the device has 21"
    );
    assert!(memory([Some(26), None]).is_err());
}

#[test]
fn a_device_that_is_named_twice_is_refused_unless_a_placement_is_made_by_hand() {
    let flex = Device::flex();
    let twice = vec![("one".into(), flex.clone()), ("two".into(), flex.clone())];
    let error = Devices::new(twice).unwrap_err();
    assert_eq!(error.to_string(), "devices: two is named twice");
    if let Ok(wgpu) = DeviceSpec::Wgpu.init() {
        let unlike = vec![("one".into(), flex.clone()), ("two".into(), wgpu)];
        let error = Devices::new(unlike).unwrap_err().to_string();
        assert!(error.starts_with("devices: two is a "), "{error}");
        assert!(
            error.ends_with(", one a flex: they must be alike"),
            "{error}"
        );
    }
    assert_eq!(Devices::new(vec![]).unwrap_err(), PlacementError::NoDevice);

    let placement = Placement::new(&[flex.clone(), flex.clone()], &[1, 3]).unwrap();
    assert_eq!((placement.layers(), placement.runs().len()), (4, 2));
    assert!(placement.is_divided() && !placement.is_distinct());
    assert!(Placement::new(&[flex.clone(), flex.clone()], &[0, 4]).is_err());
    let first = placement.first_layers(1);
    assert_eq!((first.layers(), first.runs().len()), (1, 1));
    assert_eq!(placement.first_layers(2).runs()[1].layers, 1..2);
    let devices = Devices::from(&flex);
    let placement = devices
        .place(&ModelConfig::new(), &model(&[1; 3], 0, 0))
        .unwrap();
    assert_eq!(placement, Placement::single(&flex, 3));
}

#[cfg(feature = "wgpu")]
#[test]
fn the_embedding_is_with_the_first_layer_and_head_and_drafter_with_the_last() {
    use burn::tensor::DeviceKind;

    use crate::placement::Place;

    // Nothing is put there, so that they need be neither alike nor present.
    let devices = [Device::flex(), Device::wgpu(DeviceKind::Cpu)];
    let placement = Placement::new(&devices, &[2, 1]).unwrap();
    let places = [
        Place::Embedding,
        Place::Layer(1),
        Place::Layer(2),
        Place::Head,
        Place::Drafter,
    ];
    let of = |place| placement.device(place).clone();
    assert_eq!(
        places.map(of),
        [0, 0, 1, 1, 1].map(|index| devices[index].clone())
    );
}

#[test]
fn devices_have_parts_of_layers_only_where_all_that_takes_is_there() {
    let names = names(2);
    let [one, two] = [Device::flex(), Device::flex()];
    let devices = |parallel| {
        Devices {
            devices: vec![one.clone(), two.clone()],
            names: names.clone(),
            ..Devices::from(&one)
        }
        .with_parallel(parallel)
        .with_memory(1000)
    };
    let (config, model) = (ModelConfig::new(), model(&[10; 4], 5, 6));
    let chosen = |devices: &Devices, can_exchange| devices.chosen(&config, &model, || can_exchange);
    let auto = devices(Parallel::Auto);
    assert_eq!(chosen(&auto, true), Parallel::Tensor);
    assert_eq!(chosen(&auto, false), Parallel::Layers);
    // A split, memory for no more than some layers, sizes that are odd, one device.
    let split = auto.clone().with_split(Some(vec![2, 2]));
    assert_eq!(chosen(&split, true), Parallel::Layers);
    assert_eq!(
        chosen(&auto.clone().with_memory(40), true),
        Parallel::Layers
    );
    let odd = ModelConfig {
        o_groups: 3,
        ..config.clone()
    };
    assert_eq!(auto.chosen(&odd, &model, || true), Parallel::Layers);
    let alone = Devices::from(&one).with_parallel(Parallel::Auto);
    assert_eq!(chosen(&alone, true), Parallel::Layers);
    // What is named is taken, whatever the devices can do.
    for parallel in [Parallel::Layers, Parallel::Tensor] {
        for can_exchange in [false, true] {
            assert_eq!(chosen(&devices(parallel), can_exchange), parallel);
        }
    }
    // Devices of the host have no memory to exchange through.
    let placement = auto.place(&config, &model).unwrap();
    assert_eq!((placement.ranks().len(), placement.runs().len()), (0, 2));
}

#[test]
fn the_log_names_each_device_with_what_it_has() {
    let flex = Device::flex();
    let devices = Devices {
        devices: vec![flex.clone(), flex.clone()],
        names: names(2),
        ..Devices::from(&flex)
    };
    let (config, model) = (ModelConfig::new(), model(&[10; 4], 5, 6));
    let lines = |parallel| {
        let plan = Plan::new(&config, &model, &devices.names, parallel, None).unwrap();
        devices.lines(&plan, parallel).collect::<Vec<_>>()
    };
    assert_eq!(
        lines(Parallel::Layers),
        [
            "cuda:0: layers 0 to 1, 25 bytes of weights, 2 of caches",
            "cuda:1: layers 2 to 3, 26 bytes of weights, 2 of caches",
        ]
    );
    assert_eq!(
        lines(Parallel::Tensor)[0],
        "cuda:0: a part of each of the layers 0 to 3, 48 bytes of weights, 4 of caches"
    );
    let error = Plan::new(&config, &model, &names(2), Parallel::Tensor, Some(&[2, 2]));
    assert_eq!(
        error.unwrap_err().to_string(),
        "split [2, 2]: each device has a part of every layer"
    );
}

#[test]
fn layers_of_v41_are_whole_and_those_that_share_rows_on_one_device() {
    let config = crate::config::v41_flash();
    assert!(config.has_v41_parts() && !ModelConfig::new().has_v41_parts());
    let mut dspark = config.dspark.clone().unwrap();
    dspark.taps_inputs = true;
    for (part, config) in [
        ("engram", ModelConfig::new().with_engram(config.engram)),
        ("taps", ModelConfig::new().with_dspark(Some(dspark))),
        ("layers", ModelConfig::new().with_layers(config.layers)),
        ("weights", ModelConfig::new().with_late_pre_mix(true)),
    ] {
        assert!(check_shared(&config, 0..1, true).is_ok(), "{part}");
        assert!(check_shared(&config, 0..1, false).is_err(), "{part}");
    }
    assert!(check_shared(&ModelConfig::new(), 0..9, false).is_ok());
    let config = crate::config::v41_flash();
    let begins = vec![0, 1, 2, 8, 14, 20];
    for layer in 0..config.layers.len() {
        let checked = check_shared(&config, layer..layer + 1, true);
        let begins = begins.clone();
        match begins.contains(&layer) {
            true => assert_eq!(checked, Ok(())),
            false => assert_eq!(checked, Err(PlacementError::SharedRows { begins })),
        }
    }
}

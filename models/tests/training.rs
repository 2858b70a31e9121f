//! Reading digits, training on them, and laying images out.

use candle_core::{Device, Tensor};
use memory_compiler_models::{
    Error, ModelKind, Result,
    digits::Digits,
    sheet,
    training::{Settings, Trainer},
    weights::{Source, load},
};
use std::{collections::HashMap, path::Path};

/// A package with one image of each digit: a bar whose place tells the digit.
fn package(folder: &Path) {
    let digits = folder.join("src/digits");
    std::fs::create_dir_all(&digits).expect("a folder is made");
    for digit in 0..10 {
        let ink = (0..784).map(|pixel| f64::from(u8::from(pixel % 28 / 2 == digit + 2)));
        let data = serde_json::json!({ "data": ink.collect::<Vec<f64>>() });
        let path = digits.join(format!("{digit}.json"));
        std::fs::write(path, data.to_string()).expect("a file is written");
    }
}

fn settings(kind: ModelKind, steps: usize) -> Settings {
    Settings {
        kind,
        steps,
        batch: 8,
        shards: 2,
        learning_rate: 2e-3,
        seed: 3,
    }
}

#[test]
fn digits_are_read_as_numbers_from_minus_one_to_one() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    package(folder.path());
    let digits = Digits::read(folder.path())?;
    assert_eq!(digits.len(), 10);
    let (pixels, label) = digits.image(4);
    assert_eq!(label, 4);
    assert_eq!(pixels.len(), 784);
    assert_eq!((pixels[0], pixels[12]), (-1.0, 1.0));
    Ok(())
}

#[test]
fn damaged_digits_are_refused_with_the_file_that_is_wrong() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    package(folder.path());
    let three = folder.path().join("src/digits/3.json");
    for damage in [
        "no json",
        "{}",
        "{\"data\": []}",
        "{\"data\": [0.5]}",
        &serde_json::json!({ "data": vec![2.0; 784] }).to_string(),
    ] {
        std::fs::write(&three, damage).expect("a file is written");
        match Digits::read(folder.path()) {
            Err(Error::Read { path, .. }) => assert_eq!(path, three),
            other => panic!("{damage}: {other:?}"),
        }
    }
    std::fs::remove_file(&three).expect("the file is removed");
    assert!(Digits::read(folder.path()).is_err());
}

#[test]
fn a_seed_gives_the_same_losses_and_training_lowers_them() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    package(folder.path());
    let digits = Digits::read(folder.path())?;
    for (kind, steps) in [(ModelKind::Unet, 12), (ModelKind::Dit, 40)] {
        let losses = |steps: usize, taken: usize| -> Result<Vec<f32>> {
            let mut trainer = Trainer::new(settings(kind, steps), &digits)?;
            (0..taken).map(|_| trainer.step()).collect()
        };
        let first = losses(steps, steps)?;
        assert_eq!(first[..3], losses(steps, 3)?, "{kind:?}");
        assert!(first[steps - 1] < 0.8 * first[0], "{kind:?}: {first:?}");
    }
    Ok(())
}

#[test]
fn saved_weights_are_loaded_and_trained_further() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    package(folder.path());
    let digits = Digits::read(folder.path())?;
    let path = folder.path().join("weights.safetensors");
    let mut trainer = Trainer::new(settings(ModelKind::Dit, 2), &digits)?;
    trainer.step()?;
    trainer.save(HashMap::new(), &path)?;
    load(ModelKind::Dit, Source::File(&path))?;

    let mut further = Trainer::new(settings(ModelKind::Dit, 2), &digits)?;
    further.start_from(&path)?;
    let again = folder.path().join("again.safetensors");
    further.save(HashMap::new(), &again)?;
    assert_eq!(
        std::fs::read(&path).expect("the file is there"),
        std::fs::read(&again).expect("the file is there")
    );

    let mut other = Trainer::new(settings(ModelKind::Unet, 2), &digits)?;
    assert!(matches!(
        other.start_from(&path),
        Err(Error::Weights { .. })
    ));
    Ok(())
}

#[test]
fn a_sheet_shows_every_image_where_it_belongs() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("sheet.png");
    let black = Tensor::full(-1f32, (3, 1, 28, 28), &Device::Cpu)?;
    let white = Tensor::full(9f32, (1, 1, 28, 28), &Device::Cpu)?;
    sheet::write(&Tensor::cat(&[&black, &white], 0)?, 2, &path)?;

    let file = std::fs::File::open(&path).expect("the sheet is there");
    let mut reader = png::Decoder::new(std::io::BufReader::new(file))
        .read_info()
        .expect("the sheet is a PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("the sheet has a size")];
    let info = reader
        .next_frame(&mut pixels)
        .expect("the sheet has pixels");
    let (width, height) = (info.width as usize, info.height as usize);
    assert_eq!((width, height), (180, 180));
    let at = |x: usize, y: usize| pixels[y * width + x];
    // Only the second image of the second row is white, and its value is cut to white.
    assert_eq!([at(50, 50), at(130, 50), at(50, 130)], [0; 3]);
    assert_eq!(at(130, 130), 255);
    assert_eq!(at(179, 179), 0);
    Ok(())
}

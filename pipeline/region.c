/* Decode a region of a JPEG with the libjpeg-turbo that Pillow is linked with.

pipeline/region.py compiles this file and passes the addresses of the library's functions. There are
no headers to install: the declarations below are the part of libjpeg's C interface that is used.
libjpeg reports errors through a function that must not return, so this cannot be written in Python.
*/

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

enum { OK, FAILED };
enum { RGB = 2 };       /* J_COLOR_SPACE */
enum { HEADER_OK = 1 }; /* of jpeg_read_header */
enum { NARROW = 16 };   /* columns; the library does not interpolate chroma of two or less */

struct errors { /* jpeg_error_mgr */
    void (*error_exit)(void *);
    void (*emit_message)(void *, int);
    void (*output_message)(void *);
    void (*format_message)(void *, char *);
    void (*reset_error_mgr)(void *);
    int msg_code;
    int msg_parm[20]; /* a union with 80 bytes of text */
    int trace_level;
    long num_warnings;
    void *tables[8]; /* larger than the message tables that follow */
    jmp_buf failure; /* of this file */
};

/* The versions 62, 70 and 80 of libjpeg's binary interface have the same first fields in
jpeg_component_info and jpeg_decompress_struct. The library states the size of the latter. */
struct component {
    int id, index, across, down; /* blocks per unit of the image: sampling factors */
    int others[16];
    void *tables[2];
};

struct decoder {
    struct errors *err;
    void *mem, *progress, *client_data;
    int is_decompressor, global_state;
    void *src;
    unsigned image_width, image_height;
    int num_components, jpeg_color_space, out_color_space;
    unsigned scale_num, scale_denom;
    double output_gamma;
    int options[12]; /* from buffered_image to enable_2pass_quant */
    unsigned output_width, output_height;
    int out_color_components, output_components, rec_outbuf_height, actual_number_of_colors;
    void *colormap;
    unsigned output_scanline, input_progress[2], output_progress[2];
    int (*coef_bits)[64]; /* a progressive file: bits of each coefficient that are still missing */
    void *tables[12];
    int data_precision;
    struct component *components;
};

struct functions { /* in the order of FUNCTIONS in region.py */
    struct errors *(*std_error)(struct errors *);
    void (*create)(struct decoder *, int version, size_t size);
    void (*mem_src)(struct decoder *, const unsigned char *, unsigned long);
    int (*read_header)(struct decoder *, int require_image);
    int (*start)(struct decoder *);
    void (*crop)(struct decoder *, unsigned *left, unsigned *width);
    unsigned (*skip)(struct decoder *, unsigned lines);
    unsigned (*read)(struct decoder *, unsigned char **rows, unsigned lines);
    void (*destroy)(struct decoder *);
};

struct library {
    struct functions jpeg;
    int version;
    size_t size; /* of jpeg_decompress_struct, in bytes */
};

struct region { /* in pixels of the image at 1 / scale */
    unsigned left, top, right, bottom, scale;
};

static void fail(void *decoder) {
    longjmp(((struct decoder *)decoder)->err->failure, 1);
}

/* A warning means that the pixels are a guess. The caller lets Pillow decide about the file. */
static void fail_on_warning(void *decoder, int level) {
    if (level < 0) fail(decoder);
}

static void catch_errors(const struct library *library, struct decoder *decoder,
                         struct errors *errors) {
    decoder->err = library->jpeg.std_error(errors);
    errors->error_exit = fail;
    errors->emit_message = fail_on_warning;
}

/* Return what `create` expects: the version if `version` is wrong, otherwise the size. */
static int expected(const struct library *library, int version) {
    struct errors errors;
    struct decoder decoder;
    catch_errors(library, &decoder, &errors);
    if (setjmp(errors.failure)) return errors.msg_parm[0];
    library->jpeg.create(&decoder, version, 0);
    return 0;
}

/* Complete `library`, whose functions the caller has set. */
int region_open(struct library *library) {
    library->version = expected(library, 0);
    if (sizeof(struct component) != 96) return FAILED; /* not a 64-bit machine */
    if (library->version != 62 && library->version != 70 && library->version != 80) return FAILED;
    library->size = (size_t)expected(library, library->version);
    return library->size > sizeof(struct decoder) && library->size < 4096 ? OK : FAILED;
}

/* Whether chroma has one block per unit: 4:4:4, 4:2:2, 4:2:0 and the like. With factors such as
2, 4, 1, the library's pixels of a region differ from those of the whole image. */
static int usual_colour(const struct decoder *decoder) {
    const struct component *chroma = decoder->components + 1;
    return decoder->num_components == 3 && chroma[0].across == 1 && chroma[0].down == 1 &&
           chroma[1].across == 1 && chroma[1].down == 1;
}

/* The library smooths the blocks of a progressive file that lacks scans. At the edges of a region,
the smoothed pixels differ from those of the whole image. */
static int complete(const struct decoder *decoder) {
    int component, coefficient;
    for (component = 0; decoder->coef_bits && component < decoder->num_components; component++)
        for (coefficient = 0; coefficient < 64; coefficient++)
            if (decoder->coef_bits[component][coefficient]) return 0;
    return 1;
}

/* Decode the region line by line into `line`, and copy its columns from there. */
static void read_lines(const struct library *library, struct decoder *decoder,
                       const struct region *region, unsigned char *volatile *line,
                       unsigned char *out) {
    const struct functions *jpeg = &library->jpeg;
    const size_t bytes = 3 * (size_t)(region->right - region->left);
    unsigned start = region->left ? region->left - 1 : 0, end = region->right, width;
    unsigned char *row;

    if (region->left >= region->right || region->right > decoder->output_width ||
        region->top >= region->bottom || region->bottom > decoder->output_height)
        fail(decoder);
    /* Chroma at the edges is interpolated from neighbours: with more columns, the pixels are those
    of the whole image. The library moves the left edge to the start of a block. */
    end = decoder->output_width - end < 2 ? decoder->output_width : end + 2;
    if (end - start < NARROW) start = end > NARROW ? end - NARROW : 0;
    width = end - start;
    jpeg->crop(decoder, &start, &width);
    row = *line = malloc(3 * (size_t)width);
    if (!row || jpeg->skip(decoder, region->top) != region->top) fail(decoder);
    while (decoder->output_scanline < region->bottom) {
        if (jpeg->read(decoder, &row, 1) != 1) fail(decoder);
        memcpy(out, row + 3 * (size_t)(region->left - start), bytes);
        out += bytes;
    }
}

/* Decode a region of a colour JPEG into `out`, uint8 [bottom - top, right - left, 3]. */
int region_decode(const struct library *library, const unsigned char *data, unsigned long length,
                  const struct region *region, unsigned char *out) {
    const struct functions *jpeg = &library->jpeg;
    struct errors errors;
    unsigned char *volatile line = NULL; /* volatile: set between setjmp and longjmp */
    union {
        struct decoder fields;
        char whole[4096];
    } memory;
    struct decoder *decoder = &memory.fields;
    volatile int status = FAILED;

    catch_errors(library, decoder, &errors);
    decoder->mem = NULL; /* `destroy` works before `create` */
    if (!setjmp(errors.failure)) {
        jpeg->create(decoder, library->version, library->size);
        jpeg->mem_src(decoder, data, length);
        if (jpeg->read_header(decoder, 1) == HEADER_OK && usual_colour(decoder)) {
            decoder->out_color_space = RGB;
            decoder->scale_num = 1;
            decoder->scale_denom = region->scale;
            if (!jpeg->start(decoder) || !complete(decoder)) fail(decoder);
            read_lines(library, decoder, region, &line, out);
            status = OK;
        }
    }
    jpeg->destroy(decoder); /* also frees the memory of an unfinished image */
    free(line);
    return status;
}

/* Decode a region of a JPEG with the libjpeg-turbo that Pillow is linked with.

pipeline/data/region.py compiles this file and passes the addresses of the library's functions. There are
no headers to install: the declarations below are the part of libjpeg's C interface that is used.
libjpeg reports errors through a function that must not return, so this cannot be written in Python.
*/

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

enum { OK, FAILED, DAMAGED };
enum { RGB = 2 };       /* J_COLOR_SPACE */
enum { HEADER_OK = 1 }; /* of jpeg_read_header */
enum { GREY = 1, COLOUR = 3 }; /* numbers of components */
enum { TEXT = 200 };    /* bytes of a message, JMSG_LENGTH_MAX */
enum { PADDING = 64 };  /* bytes before a marker that do no harm: some cameras write a few */
enum { TAIL = 64 };     /* bytes at the end, of which two are the end marker */
enum { NARROW = 16 };   /* columns; the library does not interpolate chroma of two or less */

struct errors { /* jpeg_error_mgr */
    void (*error_exit)(void *);
    void (*emit_message)(void *, int);
    void (*output_message)(void *);
    void (*format_message)(void *, char *);
    void (*reset)(void *);
    int msg_code;
    int msg_parm[20]; /* numbers of the message; a union with 80 bytes of text */
    int trace_level;
    long num_warnings;
    void *tables[8]; /* larger than the message tables that follow */
    jmp_buf failure; /* this and what follows is of this file */
    int damaged;
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

static struct { /* in the order of FUNCTIONS in region.py */
    struct errors *(*std_error)(struct errors *);
    void (*create)(struct decoder *, int version, size_t size);
    void (*mem_src)(struct decoder *, const unsigned char *, unsigned long);
    int (*read_header)(struct decoder *, int require_image);
    int (*start)(struct decoder *);
    void (*crop)(struct decoder *, unsigned *left, unsigned *width);
    unsigned (*skip)(struct decoder *, unsigned lines);
    unsigned (*read)(struct decoder *, unsigned char **rows, unsigned lines);
    int (*finish)(struct decoder *);
    void (*destroy)(struct decoder *);
} jpeg;
static int version;        /* of the binary interface */
static size_t struct_size; /* of jpeg_decompress_struct, in bytes */

struct region { /* in pixels of the image at 1 / scale */
    unsigned left, top, right, bottom, scale;
};

static void fail(void *decoder) {
    longjmp(((struct decoder *)decoder)->err->failure, 1);
}

/* After a warning of corrupt data or a premature end, the pixels are a guess. The caller lets Pillow
decide about a file with any other warning. */
static void fail_on_warning(void *decoder, int level) {
    struct errors *errors = ((struct decoder *)decoder)->err;
    char text[TEXT];
    if (level >= 0) return;
    errors->format_message(decoder, text);
    if (strstr(text, "extraneous bytes") && errors->msg_parm[0] <= PADDING) return;
    errors->damaged = strstr(text, "Corrupt JPEG data") || strstr(text, "Premature end");
    fail(decoder);
}

static void catch_errors(struct decoder *decoder, struct errors *errors) {
    decoder->err = jpeg.std_error(errors);
    errors->error_exit = fail;
    errors->emit_message = fail_on_warning;
    errors->damaged = 0;
}

/* Return what `create` expects: the version if `given` is wrong, otherwise the size. */
static int expected(int given) {
    struct errors errors;
    struct decoder decoder;
    catch_errors(&decoder, &errors);
    if (setjmp(errors.failure)) return errors.msg_parm[0];
    jpeg.create(&decoder, given, 0);
    return 0;
}

/* Take the addresses of the library's functions. */
int region_open(const void *functions) {
    memcpy(&jpeg, functions, sizeof jpeg);
    version = expected(0);
    if (sizeof(struct component) != 96) return FAILED; /* not a 64-bit machine */
    if (version != 62 && version != 70 && version != 80) return FAILED;
    struct_size = (size_t)expected(version);
    return struct_size > sizeof(struct decoder) && struct_size < 4096 ? OK : FAILED;
}

/* Whether the library gives a region the pixels of the whole image. It does not if chroma has more
than one block per unit, unlike 4:4:4, 4:2:2 and 4:2:0; nor at the edges of a region of a progressive
file that lacks scans, because it smooths the blocks. */
static int exact(const struct decoder *decoder) {
    const struct component *chroma = decoder->components + 1;
    int i;
    for (i = 0; decoder->coef_bits && i < 64 * decoder->num_components; i++)
        if (decoder->coef_bits[i / 64][i % 64]) return 0;
    if (decoder->num_components == GREY) return 1;
    return chroma[0].across == 1 && chroma[0].down == 1 && chroma[1].across == 1 &&
           chroma[1].down == 1;
}

/* Decode the region line by line into `line`, and copy its columns from there. */
static void read_lines(struct decoder *decoder, const struct region *region,
                       unsigned char *volatile *line, unsigned char *out) {
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
    jpeg.crop(decoder, &start, &width);
    row = *line = malloc(3 * (size_t)width);
    if (!row || jpeg.skip(decoder, region->top) != region->top) fail(decoder);
    while (decoder->output_scanline < region->bottom) {
        if (jpeg.read(decoder, &row, 1) != 1) fail(decoder);
        memcpy(out, row + 3 * (size_t)(region->left - start), bytes);
        out += bytes;
    }
}

/* Whether a file has its end marker; a few bytes may follow. */
static int has_end(const unsigned char *data, unsigned long length) {
    unsigned long i = length > TAIL ? length - TAIL : 0;
    for (; i + 1 < length; i++)
        if (data[i] == 0xFF && data[i + 1] == 0xD9) return 1;
    return 0;
}

/* Look for damage behind the region. That of most files is not read: it takes as long as decoding.
But a truncated file must be an error, even if the region is there. */
static void finish(struct decoder *decoder, unsigned char *line, int has_its_end) {
    const unsigned last = decoder->output_height - 1;
    if (decoder->output_scanline <= last) {
        if (has_its_end) return;
        jpeg.skip(decoder, last - decoder->output_scanline);
        jpeg.read(decoder, &line, 1); /* `skip` to the end would not read the data */
    }
    jpeg.finish(decoder);
}

/* Decode a region of a colour or grey JPEG into `out`, uint8 [bottom - top, right - left, 3]. */
int region_decode(const unsigned char *data, unsigned long length, const struct region *region,
                  unsigned char *out) {
    struct errors errors;
    unsigned char *volatile line = NULL; /* volatile: set between setjmp and longjmp */
    union {
        struct decoder fields;
        char whole[4096];
    } memory;
    struct decoder *decoder = &memory.fields;
    volatile int status = FAILED;

    catch_errors(decoder, &errors);
    decoder->mem = NULL; /* `destroy` works before `create` */
    if (!setjmp(errors.failure)) {
        jpeg.create(decoder, version, struct_size);
        jpeg.mem_src(decoder, data, length);
        if (jpeg.read_header(decoder, 1) != HEADER_OK) fail(decoder);
        if (decoder->num_components != GREY && decoder->num_components != COLOUR) fail(decoder);
        decoder->out_color_space = RGB;
        decoder->scale_num = 1;
        decoder->scale_denom = region->scale;
        if (!jpeg.start(decoder) || !exact(decoder)) fail(decoder);
        read_lines(decoder, region, &line, out);
        finish(decoder, line, has_end(data, length));
        status = OK;
    }
    if (errors.damaged) status = DAMAGED;
    jpeg.destroy(decoder); /* also frees the memory of an unfinished image */
    free(line);
    return status;
}
